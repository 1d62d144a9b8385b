"""The curious server records and never alters: every strategy that Flower ships, with and without it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as shipped
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from fedsim.base.errors import TranscriptError
from fedsim.federation.engines.cohort import COHORT_MESSAGE_TYPE, CohortGrid
from fedsim.federation.engines.node import play_cohort
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.transcript import Transcript
from strategies.curious import Curious

CLIENTS, ROUNDS, FAILING_ROUND = 7, 3, 2
Arrays = dict[str, NDArray[Any]]


def inner() -> FedAvg:
    return FedAvg(min_train_nodes=CLIENTS)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": inner,
    "FedAvg, half of the clients": lambda: FedAvg(fraction_train=0.6),
    "FedAvgM": lambda: shipped.FedAvgM(server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": shipped.FedAdam,
    "FedAdagrad": shipped.FedAdagrad,
    "FedYogi": shipped.FedYogi,
    "FedProx": lambda: shipped.FedProx(proximal_mu=0.3),
    "FedMedian": shipped.FedMedian,
    "FedTrimmedAvg": lambda: shipped.FedTrimmedAvg(beta=0.2),
    "QFedAvg": lambda: shipped.QFedAvg(client_learning_rate=0.1, q=0.5),
    "Krum": lambda: shipped.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: shipped.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: shipped.Bulyan(num_malicious_nodes=1),
    "DifferentialPrivacyServerSideFixedClipping": lambda: shipped.DifferentialPrivacyServerSideFixedClipping(
        inner(), noise_multiplier=0.5, clipping_norm=0.1, num_sampled_clients=CLIENTS
    ),
    "DifferentialPrivacyClientSideFixedClipping": lambda: shipped.DifferentialPrivacyClientSideFixedClipping(
        inner(), noise_multiplier=0.5, clipping_norm=0.1, num_sampled_clients=CLIENTS
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": lambda: shipped.DifferentialPrivacyServerSideAdaptiveClipping(
        inner(), noise_multiplier=0.5, num_sampled_clients=CLIENTS
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": lambda: shipped.DifferentialPrivacyClientSideAdaptiveClipping(
        inner(), noise_multiplier=0.5, num_sampled_clients=CLIENTS
    ),
    "FedXgbBagging": shipped.FedXgbBagging,
    "FedXgbCyclic": shipped.FedXgbCyclic,
}


def start_of(name: str) -> Arrays:
    if name.startswith("FedXgb"):  # trees as JSON bytes; the first model is empty
        return {"0": np.empty(0, dtype=np.uint8)}
    rng = np.random.default_rng(0)
    return {
        "layer.weight": rng.normal(size=(4, 3)).astype(np.float32),
        "layer.bias": rng.normal(size=3).astype(np.float32),
        "scale": np.array(0.5, dtype=np.float32),
    }


def a_forest(client: int) -> NDArray[Any]:
    """As much of XGBoost's JSON as Flower's bagging reads."""
    forest = {
        "learner": {
            "gradient_booster": {
                "model": {
                    "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
                    "iteration_indptr": [0, 1],
                    "trees": [{"id": 0, "split": client}],
                    "tree_info": [0],
                }
            }
        }
    }
    return np.frombuffer(json.dumps(forest).encode(), dtype=np.uint8)


class Clients:
    """A ClientApp that moves the model by something of its own, and keeps a log of the wire."""

    def __init__(self, failing: bool) -> None:
        self.failing = failing
        self.wire: dict[tuple[int, int], tuple[Arrays, Arrays]] = {}
        self.app = ClientApp()
        self.app.train()(self.train)

    def train(self, message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        number = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        before = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        if self.failing and client == 1 and number == FAILING_ROUND:
            raise ValueError("out of memory")
        if "0" in before:
            after = {"0": a_forest(client)}
        else:
            rng = np.random.default_rng((number, client))
            after = {k: (v + 0.1 * rng.normal(size=v.shape)).astype(v.dtype) for k, v in before.items()}
        self.wire[number, client] = (before, {name: array.copy() for name, array in after.items()})
        metrics = {"num-examples": 10 + client, "train_loss": 1.0 + client, "norm_bit": client % 2}
        content = RecordDict(
            {
                "arrays": ArrayRecord({name: Array(np.asarray(array)) for name, array in after.items()}),
                "metrics": MetricRecord({**metrics, "partition-id": client}),
            }
        )
        return Message(content, reply_to=message)


def federate(
    strategy: Strategy, clients: Clients, start: Arrays, rounds: int = ROUNDS, grid: Grid | None = None
) -> list[tuple[bytes, Any]]:
    """The aggregates of each round, to the byte, as Flower's own loop computes them."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 (Flower's noise comes from there)
    grid = grid or InProcessGrid(clients.app, CLIENTS)
    arrays = ArrayRecord({name: Array(value) for name, value in start.items()})
    results: list[tuple[bytes, Any]] = []
    for number in range(1, rounds + 1):
        messages = strategy.configure_train(number, arrays, ConfigRecord({"lr": 0.1}), grid)
        replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
        aggregate, metrics = strategy.aggregate_train(number, replies)
        if aggregate is not None:
            arrays = aggregate
        results.append((b"".join(array.data for array in arrays.values()), metrics and dict(metrics)))
    return results


def test_no_strategy_is_forgotten() -> None:
    concrete = {name for name in shipped.__all__ if name not in ("Result", "Strategy")}
    assert concrete <= set(STRATEGIES)


ALIKE = (
    *("FedAvg, half of the clients", "FedAdagrad", "FedYogi", "FedTrimmedAvg", "MultiKrum"),
    *("DifferentialPrivacyServerSideFixedClipping", "DifferentialPrivacyClientSideFixedClipping", "FedXgbBagging"),
)
"""Strategies that do what another one does with other numbers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else ()) for name in STRATEGIES]
)
def test_aggregates_are_the_same_to_the_bit_and_records_are_what_was_sent(name: str, tmp_path: Path) -> None:
    start = start_of(name)
    plain = federate(STRATEGIES[name](), Clients(failing=True), start)
    clients = Clients(failing=True)
    watched = federate(Curious(STRATEGIES[name](), tmp_path), clients, start)
    assert watched == plain
    assert len({result for result, _ in plain}) > 1, "the model never moved, so this shows nothing"

    transcript = Transcript(tmp_path)
    assert transcript.rounds == list(range(1, ROUNDS + 1))
    clients_of = {number: transcript.clients(number) for number in transcript.rounds}
    recorded = {
        (n, client): transcript.recorded_update(n, client) for n, present in clients_of.items() for client in present
    }
    assert recorded.keys() == clients.wire.keys()
    for key, (before, after) in clients.wire.items():
        update = recorded[key]
        for state, sent in ((update.before, before), (update.after, after)):
            assert list(state) == list(sent)
            for entry, value in sent.items():
                assert state[entry].numpy().dtype == value.dtype
                assert state[entry].numpy().tobytes() == value.tobytes()
        client = key[1]
        assert update.num_examples == 10 + client
        assert dict(update.metrics) == {"train_loss": 1.0 + client, "norm_bit": client % 2}
        assert update.config["lr"] == 0.1
        assert update.config["server-round"] == key[0]
    was_asked = name not in ("FedAvg, half of the clients", "FedXgbCyclic")
    assert transcript.header(FAILING_ROUND).failures or not was_asked


def test_mutating_strategies_really_do_mutate() -> None:
    """Else the test above would not show that copies are needed."""
    for name in ("QFedAvg", "Bulyan", "DifferentialPrivacyServerSideFixedClipping"):
        strategy, clients = STRATEGIES[name](), Clients(failing=False)
        grid = InProcessGrid(clients.app, CLIENTS)
        arrays = ArrayRecord({key: Array(value) for key, value in start_of(name).items()})
        replies = list(grid.send_and_receive(strategy.configure_train(1, arrays, ConfigRecord(), grid)))
        before = [b"".join(a.data for a in reply.content.array_records["arrays"].values()) for reply in replies]
        strategy.aggregate_train(1, replies)
        after = [b"".join(a.data for a in reply.content.array_records["arrays"].values()) for reply in replies]
        assert before != after, name


class Personal(FedAvg):
    """Sends each client a model of its own, and then scribbles over what it sent."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = []
        for node in sorted(grid.get_node_ids()):
            own = ArrayRecord({name: Array(np.asarray(a.numpy() + node)) for name, a in arrays.items()})
            content = RecordDict({"arrays": own, "config": ConfigRecord({"server-round": server_round})})
            messages.append(Message(content, node, "train"))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        for reply in replies:
            for record in reply.content.array_records.values():
                record.clear()
        return result


def test_a_broadcast_of_its_own_is_recorded_for_each_client(tmp_path: Path) -> None:
    clients = Clients(failing=False)
    federate(Curious(Personal(), tmp_path), clients, start_of("Personal"), rounds=2)
    transcript = Transcript(tmp_path)
    assert len(transcript.header(1).broadcasts) == CLIENTS
    for update in transcript.updates():
        before, after = clients.wire[update.round, update.client]
        for name in before:
            assert update.before[name].numpy().tobytes() == before[name].tobytes()
            assert update.after[name].numpy().tobytes() == after[name].tobytes()


class OneRateEach(FedAvg):
    """Sends the first client another learning rate, and one that others are not sent."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config = ConfigRecord({"lr": 0.1, "local-epochs": 2, "flag": True})
        messages = list(super().configure_train(server_round, arrays, config, grid))
        own = RecordDict({"a": arrays, "c": ConfigRecord({**dict(config), "lr": 0.5, "flag": 1, "own": "x"})})
        messages[0] = Message(own, messages[0].metadata.dst_node_id, "train")
        return messages


def test_a_fact_is_recorded_only_where_it_is_true_of_each_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transcript = one_round(tmp_path, lambda client: {"num-examples": 5}, OneRateEach())
    config = {"local-epochs": 2, "server-round": 1, "differs-by-client": "flag, lr, own"}
    assert transcript.header(1).config == config
    assert all(update.config == config for update in transcript.updates())
    assert caplog.text.count("round 1: clients are not all sent the same flag, lr, own; it is not recorded") == 1


# Whom an update is from, and of how many examples.


class Unweighted(FedAvg):
    """Takes the first reply, whatever it weighs."""

    def __init__(self) -> None:
        super().__init__(weighted_by_key="n")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return next(iter(replies)).content.array_records["a"], None


def one_round(
    folder: Path, metrics: Callable[[int], dict[str, Any]], strategy: Strategy | None = None, nodes: int = 3
) -> Transcript:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = ArrayRecord({"w": Array(np.full(2, client + 1, np.float32))})
        return Message(RecordDict({"a": arrays, "m": MetricRecord(metrics(client))}), reply_to=message)

    grid = InProcessGrid(app, nodes)
    curious = Curious(strategy or FedAvg(), folder)
    messages = curious.configure_train(1, ArrayRecord({"w": Array(np.zeros(2, np.float32))}), ConfigRecord(), grid)
    curious.aggregate_train(1, grid.send_and_receive(messages))
    return Transcript(folder)


def test_without_a_partition_id_the_node_id_names_the_client(tmp_path: Path) -> None:
    transcript = one_round(tmp_path, lambda client: {"num-examples": 5 + client})
    assert transcript.clients(1) == [2, 3, 4]  # node ids of the in-process grid
    assert [u.num_examples for u in transcript.updates()] == [5, 6, 7]


def test_a_reported_partition_id_names_the_client_and_is_no_metric(tmp_path: Path) -> None:
    transcript = one_round(tmp_path, lambda client: {"num-examples": 5, "partition-id": 10 - client, "x": 0.5})
    assert transcript.clients(1) == [8, 9, 10]
    assert [float(u.after["w"][0]) for u in transcript.updates()] == [3, 2, 1]
    assert all(dict(u.metrics) == {"x": 0.5} for u in transcript.updates())


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0])
def test_nonsense_for_a_number_does_not_stop_the_federation(tmp_path: Path, nonsense: float) -> None:
    """The strategy does not weigh by N, so nothing but the recording reads it."""
    transcript = one_round(tmp_path, lambda client: {"n": nonsense, "partition-id": nonsense}, Unweighted())
    assert transcript.clients(1) == [2, 3, 4]
    assert [u.num_examples for u in transcript.updates()] == [0, 0, 0]


def test_of_two_nodes_with_one_partition_id_the_second_keeps_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transcript = one_round(tmp_path, lambda client: {"num-examples": 5, "partition-id": [9, 7, 9][client]})
    assert {u.client: float(u.after["w"][0]) for u in transcript.updates()} == {9: 1, 7: 2, 4: 3}
    assert "node 4 calls itself client 9, as node 2 does; it is called 4 here" in caplog.text


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "under a privacy wrapper"])
def test_the_number_of_examples_is_read_where_the_strategy_reads_it(tmp_path: Path, wrapped: bool) -> None:
    strategy: Strategy = FedAvg(weighted_by_key="count")
    if wrapped:
        strategy = shipped.DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=3
        )
    transcript = one_round(tmp_path, lambda client: {"count": 5 + client, "list": [1.0, 2.0]}, strategy)
    assert [u.num_examples for u in transcript.updates()] == [5, 6, 7]
    assert all(dict(u.metrics) == {} for u in transcript.updates())


# What is not passed by, what is not kept.


def test_it_works_under_flowers_own_loop(tmp_path: Path) -> None:
    clients = Clients(failing=False)
    grid = InProcessGrid(clients.app, CLIENTS)
    start = ArrayRecord({name: Array(value) for name, value in start_of("FedAvg").items()})
    result = Curious(FedAvg(fraction_evaluate=0.0), tmp_path).start(grid, start, num_rounds=2)
    assert Transcript(tmp_path).rounds == [1, 2]
    assert list(result.arrays) == list(start)


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for rounds in (1, 2):
        federate(Curious(FedAvg(), tmp_path), Clients(False), start_of("FedAvg"), rounds=rounds)
    assert Transcript(tmp_path / "run-1").rounds == [1]
    assert Transcript(tmp_path / "run-2").rounds == [1, 2]
    with pytest.raises(TranscriptError, match=f"{tmp_path}: holds 2 runs; name one of them, such as .*/run-2"):
        Transcript(tmp_path)
    with pytest.raises(TranscriptError, match="already holds a recording"):
        Curious(FedAvg(), Recorder(tmp_path / "run-1" / "transcript"))


def test_the_plan_bounds_the_recording_and_not_the_federation(tmp_path: Path) -> None:
    start = start_of("FedAvg")
    plain = federate(inner(), Clients(False), start)
    recorder = Recorder(tmp_path, RecordingPlan(rounds=[2, 3], clients=[0, 3]))
    assert federate(Curious(inner(), recorder), Clients(False), start) == plain
    transcript = Transcript(tmp_path)
    assert {number: transcript.clients(number) for number in transcript.rounds} == {2: [0, 3], 3: [0, 3]}


def test_a_round_in_which_nobody_is_asked_is_not_recorded(tmp_path: Path) -> None:
    curious = Curious(FedAvg(fraction_train=0.0), tmp_path)
    federate(curious, Clients(False), start_of("FedAvg"), rounds=1)
    assert list(tmp_path.rglob("round-*")) == []


def test_evaluation_in_a_loop_of_ones_own_passes_through(tmp_path: Path) -> None:
    app = ClientApp()

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 4, "loss": 0.25})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = InProcessGrid(app, 3)
    curious = Curious(FedAvg(), tmp_path)
    arrays = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    replies = grid.send_and_receive(curious.configure_evaluate(1, arrays, ConfigRecord(), grid))
    assert dict(curious.aggregate_evaluate(1, replies) or {}) == {"loss": 0.25}
    assert list(tmp_path.rglob("round-*")) == []


def test_over_cohorts_a_strategy_cannot_tell_the_difference() -> None:
    """The same aggregates over logical clients as over nodes of their own, summed in the same order."""
    start = start_of("FedAvg")
    clients = Clients(failing=True)
    clients.app.query(COHORT_MESSAGE_TYPE.split(".")[1])(
        lambda message, context: play_cohort(clients.app, message, context)
    )
    physical = InProcessGrid(clients.app, 2)
    cohorts = CohortGrid(physical, CLIENTS, ConfigRecord(), list(physical.get_node_ids()))
    assert federate(inner(), clients, start, grid=cohorts) == federate(inner(), Clients(failing=True), start)


def test_an_odd_reply_is_recorded_as_it_is_and_reaches_the_strategy_unchanged(tmp_path: Path) -> None:
    """What a stranger's strategy makes of it is its own affair; here it takes the first element of each."""

    class FirstElements(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            firsts = [float(reply.content.array_records["a"]["w"].numpy()[0]) for reply in replies]
            return ArrayRecord({"w": Array(np.full(2, sum(firsts), np.float32))}), None

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        kind, size = (np.int64 if client == 2 else np.float32), (1 if client == 1 else 2)
        arrays = ArrayRecord({"w": Array(np.full(size, client + 1, kind))})
        return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 5})}), reply_to=message)

    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})

    def aggregate(strategy: Strategy) -> bytes:
        grid = InProcessGrid(app, 3)
        replies = grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid))
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None
        return arrays["w"].data

    assert aggregate(Curious(FirstElements(), tmp_path)) == aggregate(FirstElements())
    transcript = Transcript(tmp_path)
    assert transcript.header(1).failures == {}
    remarks = {client: transcript.recorded_update(1, client).remarks for client in transcript.clients(1)}
    assert remarks == {  # node ids of the in-process grid
        2: (),
        3: ("'w' came with shape (1,), and was sent with (2,)",),
        4: ("'w' came as int64, and was sent as float32",),
    }
    with pytest.raises(TranscriptError, match="'w' came as integers, but real numbers were sent"):
        _ = transcript.update(1, 4)
    with pytest.raises(TranscriptError, match=r"of 'w', \(2,\), it sent shape \(1,\)"):
        _ = transcript.update(1, 3).pseudo_gradient
