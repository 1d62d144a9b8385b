"""What holds for any partition, any cohort, any state and any plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import derive_seed, numpy_generator
from fedsim.data import Dataset, Examples
from fedsim.data.partitions.shares import Dirichlet, Iid
from fedsim.federation.engines.cohort import COHORT_MESSAGE_TYPE, CohortGrid
from fedsim.federation.engines.node import play_cohort
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.recorder import RecordingPlan
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

partitions = st.just(Iid()) | st.builds(Dirichlet, alpha=st.floats(1e-3, 1e3), min_examples=st.integers(0, 3))


@settings(max_examples=50)
@given(
    partition=partitions,
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    clients=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_a_partition_gives_each_example_to_exactly_one_client(
    partition: Iid | Dirichlet, labels: list[int], clients: int, seed: int
) -> None:
    examples = Examples(raw=torch.zeros(len(labels), 1), labels=torch.tensor(labels), scale=1.0)
    data = Dataset(name="drawn", train=examples, test=examples, num_classes=6, source="", licence="")
    try:
        shares = partition.assign(data, clients, numpy_generator(seed))
    except ConfigError:
        assume(False)
    assert len(shares) == clients
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    if isinstance(partition, Dirichlet):
        assert min(map(len, shares)) >= partition.min_examples
    else:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    again = partition.assign(data, clients, numpy_generator(seed))
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    assert examples.labels.tolist() == labels


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Clients, nodes, and who is sent which of three payloads."""
    clients = draw(st.integers(1, 9))
    nodes = draw(st.integers(1, clients))
    asked = draw(st.lists(st.integers(0, clients - 1), unique=True))
    return clients, nodes, [(client, draw(st.integers(0, 2))) for client in asked]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plan=rounds(), failing=st.sets(st.integers(0, 8)))
def test_a_cohort_answers_as_its_clients_would_one_by_one(
    plan: tuple[int, int, list[tuple[int, int]]], failing: set[int]
) -> None:
    clients, nodes, asked = plan
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client in failing:
            raise ValueError(f"client {client}")
        value = message.content.array_records["arrays"]["w"].numpy() * 10 + client
        arrays, metrics = ArrayRecord({"w": Array(value)}), MetricRecord({"n": context.node_id})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    app.query(COHORT_MESSAGE_TYPE.split(".")[1])(lambda message, context: play_cohort(app, message, context))
    physical = InProcessGrid(app, nodes)
    grid = CohortGrid(physical, clients, ConfigRecord(), list(physical.get_node_ids()))
    payloads = [RecordDict({"arrays": ArrayRecord({"w": Array(np.full(2, float(n)))})}) for n in range(3)]
    replies = list(grid.send_and_receive([Message(payloads[n], client, "train") for client, n in asked]))
    expected = dict(asked)
    assert [reply.metadata.src_node_id for reply in replies] == sorted(expected)
    for reply in replies:
        client = reply.metadata.src_node_id
        assert reply.has_error() == (client in failing)
        if reply.has_error():
            assert reply.error.reason is not None
            assert f"client {client}" in reply.error.reason
        else:
            assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [expected[client] * 10 + client] * 2
            assert reply.content.metric_records["metrics"]["n"] == client


numbers = st.lists(st.integers(1, 50), unique=True, max_size=10)


@given(rounds=st.none() | numbers, every=st.integers(1, 7), clients=st.none() | numbers)
def test_a_plan_keeps_the_first_and_then_every_kth(
    rounds: list[int] | None, every: int, clients: list[int] | None
) -> None:
    plan = RecordingPlan(rounds=rounds, every=every, clients=clients)
    chosen = sorted(rounds) if rounds is not None else list(range(1, 51))
    assert [number for number in range(1, 51) if plan.keeps_round(number)] == chosen[::every]
    assert all(plan.keeps_client(client) == (clients is None or client in clients) for client in range(51))


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6),
    moves=st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6),
)
def test_what_was_subtracted_adds_up(values: list[float], moves: list[float]) -> None:
    before = {"w": torch.tensor(values)}
    after = {"w": before["w"] - torch.tensor(moves[: len(values)])}
    update = build_update(before, after)
    assert torch.equal(update.pseudo_gradient["w"], before["w"] - after["w"])


@given(count=st.integers(1, 500), batch=st.integers(1, 600), epochs=st.integers(1, 9))
def test_steps_cover_each_epoch_exactly(count: int, batch: int, epochs: int) -> None:
    steps = LocalTraining(local_epochs=epochs, batch_size=batch).steps(count)
    assert (steps // epochs - 1) * batch < count <= steps // epochs * batch
    assert steps % epochs == 0


keys = st.lists(st.integers(-(2**40), 2**40) | st.text(max_size=8), max_size=5).map(tuple)


@given(one=keys, other=keys)
def test_different_keys_have_different_seeds(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)
