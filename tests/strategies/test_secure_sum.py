"""Sums over groups in place of updates: those of Flower's own SecAgg+, and nothing of a single client beside."""

from __future__ import annotations

import copy
import io
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.base.randomness import derive_seed
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.secure_aggregation import group_sizes
from fedsim.recording.payloads import Payload
from strategies.message_content import GROUP_RECORD, MEMBERS_KEY
from strategies.secure_sum import SecureSum
from tests.integration.test_curious_grid import Wire

pytestmark = pytest.mark.usefixtures("server_task")

SEED, ROUND, LARGEST = 7, 1, 40
SHAPES = {"weight": (3, 4), "bias": (3,), "scale": ()}
BEFORE = {name: torch.linspace(-1, 1, max(1, int(np.prod(shape)))).reshape(shape) for name, shape in SHAPES.items()}


def update_of(client: int, spread: float = 0.3) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(client)
    return {name: spread * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def count_of(client: int) -> int:
    return LARGEST - 7 * (client % 4)


def protocol(**settings: Any) -> SecureSum:
    return SecureSum(table=SecureAggregationTable(**settings), largest=LARGEST, seed=SEED)


def asked(clients: Sequence[int]) -> list[Message]:
    content = RecordDict({"arrays": make_record(BEFORE), "config": ConfigRecord({"server-round": ROUND})})
    return [Message(copy.copy(content), client, "train") for client in clients]


def answers(
    messages: Iterable[Message], *, gone: Sequence[int] = (), kind: Any = "delta", spread: float = 0.3
) -> list[Message]:
    """Ascending by client, as from the grid."""
    found = []
    for message in messages:
        client = message.metadata.dst_node_id
        if client in gone:
            found.append(Message(Error(code=2, reason="straggler"), reply_to=message))
            continue
        update = update_of(client, spread)
        if kind == "weights":
            update = {name: BEFORE[name] + tensor for name, tensor in update.items()}
        arrays = make_record(Payload.from_dense(update, kind).arrays())
        metrics = MetricRecord({"num-examples": count_of(client), "train_loss": 0.5})
        found.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
    return found


def summed(rules: SecureSum, clients: Sequence[int], **how: Any) -> list[Message]:
    messages = asked(clients)
    return list(rules.sum_groups(answers(messages, **how), messages, ROUND))


def mean_in(reply: Message) -> dict[str, Tensor]:
    (record,) = reply.content.array_records.values()
    payload = Payload.from_arrays(read_state(record), BEFORE)
    return dict(payload.values(payload.kind, BEFORE))


def true_mean(clients: Sequence[int]) -> dict[str, Tensor]:
    total = sum(map(count_of, clients))
    return {name: sum(count_of(c) * update_of(c)[name].double() for c in clients) / total for name in SHAPES}  # type: ignore[misc]


# Flower's own workflow.


def flowers_mean(
    clients: int, *, clip: float, bits: int, gone: int | None, spread: float
) -> list[np.ndarray[Any, Any]]:
    """What Flower's SecAgg+ makes of the updates of so many clients, whose rounding is drawn by our keys."""

    class Fixed(NumPyClient):
        def __init__(self, client: int) -> None:
            self.client = client

        def fit(self, parameters: Any, config: Any) -> Any:
            if self.client == gone:
                raise RuntimeError("gone")
            key = SEED, "secure aggregation", ROUND, self.client
            np.random.seed(derive_seed(*key) % 2**32)  # noqa: NPY002 (Flower quantises right after this)
            # Flower's workflow does not shift arrays without axes back to around 0.
            arrays = [np.atleast_1d(tensor.numpy()) for tensor in update_of(self.client, spread).values()]
            return arrays, count_of(self.client), {}

    found: list[Any] = []

    class Strategy(LegacyFedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            found.append([np.load(io.BytesIO(tensor)) for tensor in results[0][1].parameters.tensors])
            return results[0][1].parameters, {}

        def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            return []

    start = ndarrays_to_parameters([tensor.numpy() for tensor in BEFORE.values()])
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        everyone: Any = {"min_fit_clients": clients, "min_available_clients": clients}
        rounds = LegacyContext(context, ServerConfig(num_rounds=1), Strategy(initial_parameters=start, **everyone))
        secagg = SecAggPlusWorkflow(
            1.0, 2, max_weight=LARGEST, clipping_range=clip, quantization_range=1 << bits, timeout=9
        )
        DefaultWorkflow(fit_workflow=secagg)(grid, rounds)

    def build(context: Context) -> Any:
        return Fixed(int(context.node_config["partition-id"])).to_client()

    random.seed(3)
    app(Wire(ClientApp(client_fn=build, mods=[secaggplus_mod]), clients), Context(1, 1, {}, RecordDict(), {}))
    (mean,) = found
    return list(mean)


@pytest.mark.parametrize("gone", [None, 2], ids=["all answer", "one drops out"])
@pytest.mark.parametrize(
    ("clip", "bits", "spread"),
    [
        (1.0, 22, 0.3),
        pytest.param(8.0, 22, 0.3, marks=pytest.mark.thorough),
        (0.5, 8, 1.0),
        pytest.param(2.0, 4, 0.3, marks=pytest.mark.thorough),
    ],
)
def test_the_sum_is_that_of_flowers_own_workflow_to_the_bit(
    gone: int | None, clip: float, bits: int, spread: float
) -> None:
    expected = flowers_mean(5, clip=clip, bits=bits, gone=gone, spread=spread)
    left = [] if gone is None else [gone]
    replies = summed(protocol(clip=clip, bits=bits), range(5), gone=left, spread=spread)
    (reply,) = [reply for reply in replies if not reply.has_error()]
    for got, wanted in zip(mean_in(reply).values(), expected, strict=True):
        assert np.array_equal(np.atleast_1d(got.numpy()), wanted.astype(np.float32))


# What is seen of a group.


@pytest.mark.parametrize("kind", ["weights", "delta", "gradient"])
def test_a_group_is_its_weighted_mean_its_total_and_its_members(kind: str) -> None:
    rules = protocol(groups=3)
    replies = summed(rules, range(7), kind=kind)
    groups = rules.draw_groups(range(7), ROUND)
    assert sorted(map(len, groups)) == [3, 4]
    assert len(replies) == 2
    for reply in replies:
        members = list(reply.content.config_records[GROUP_RECORD][MEMBERS_KEY])  # type: ignore[arg-type, call-overload]
        assert members in groups
        assert reply.metadata.src_node_id == min(members)
        (metrics,) = reply.content.metric_records.values()
        assert dict(metrics) == {"num-examples": sum(map(count_of, members))}
        (record,) = reply.content.array_records.values()
        assert Payload.from_arrays(read_state(record), BEFORE).kind == ("gradient" if kind == "gradient" else "delta")
        for name, tensor in mean_in(reply).items():
            step = 2.0 / (1 << 22) * LARGEST * len(members) / sum(map(count_of, members))
            assert torch.allclose(tensor.double(), true_mean(members)[name], atol=step)


def test_a_reply_is_emptied_once_it_is_added() -> None:
    rules, messages = protocol(), asked(range(4))
    replies = answers(messages)
    (only,) = rules.sum_groups(replies, messages, ROUND)
    assert all(not record for reply in replies for record in reply.content.array_records.values())
    assert mean_in(only)


def test_groups_are_drawn_anew_in_each_round_and_follow_from_the_seed() -> None:
    rules = protocol(groups=3)
    drawn = [rules.draw_groups(range(12), number) for number in range(1, 9)]
    assert drawn == [protocol(groups=3).draw_groups(reversed(range(12)), number) for number in range(1, 9)]
    assert len({str(groups) for groups in drawn}) == 8
    for groups in drawn:
        assert sorted(client for group in groups for client in group) == list(range(12))
    assert protocol().draw_groups([5, 3, 4], 1) == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("groups", "clients", "sizes"),
    [(3, 9, [3, 3, 3]), (3, 11, [4, 4, 3]), (3, 5, [5]), (4, 3, []), ("all", 5, [5]), (2, 2, [2])],
)
def test_no_group_is_smaller_than_asked_for(groups: int | str, clients: int, sizes: list[int]) -> None:
    assert group_sizes(groups, clients) == sizes


def test_too_few_sampled_clients_are_an_error_of_the_round() -> None:
    expected = "round 1: the strategy sampled 2 clients, too few for secure_aggregation.groups = 3; sample more"
    with pytest.raises(RunError, match=expected):
        summed(protocol(groups=3), range(2))


# Drop-outs.


def test_those_who_drop_out_are_left_out_of_the_sum() -> None:
    replies = summed(protocol(threshold=3), range(5), gone=[1, 4])
    errors, (reply,) = replies[:2], [reply for reply in replies if not reply.has_error()]
    assert [error.metadata.src_node_id for error in errors if error.has_error()] == [1, 4]
    assert reply.content.config_records[GROUP_RECORD][MEMBERS_KEY] == [0, 2, 3]
    for name, tensor in mean_in(reply).items():
        assert torch.allclose(tensor.double(), true_mean([0, 2, 3])[name], atol=1e-5)


def test_a_group_with_fewer_survivors_than_the_threshold_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        replies = summed(protocol(threshold=4), range(5), gone=[1, 4])
    why = "its sum is lost: 3 of its group of 5 answered, 4 have to"
    lost = {reply.metadata.src_node_id: reply.error.reason for reply in replies}
    assert lost == {0: why, 1: "straggler", 2: why, 3: why, 4: "straggler"}
    assert f"round 1, group of clients 0, 1, 2, 3, 4: {why}" in caplog.text


def test_a_client_without_weight_is_no_member_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.test_secure_sum.count_of", lambda client: 0 if client == 2 else 20)
    failed, total = summed(protocol(clip=3.0, bits=16), [0, 1, 2, 3])
    assert failed.metadata.src_node_id == 2
    assert failed.error.reason.startswith("its weight N / N_max is rounded to 0")
    assert total.content[GROUP_RECORD][MEMBERS_KEY] == [0, 1, 3]
    assert next(iter(total.content.metric_records.values()))["num-examples"] == 60


def test_a_sum_of_clients_without_weight_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.test_secure_sum.count_of", lambda client: 0)
    replies = summed(protocol(), [0, 1, 2])
    assert [reply.has_error() for reply in replies] == [True] * 3
    assert "all weights N / N_max of its group are rounded to 0" in replies[0].error.reason


def test_a_lost_group_leaves_the_others_alone() -> None:
    rules = protocol(groups=3, threshold=1.0)
    first, second = rules.draw_groups(range(6), ROUND)
    replies = [r for r in summed(rules, range(6), gone=first[:1]) if not r.has_error()]
    assert [reply.content.config_records[GROUP_RECORD][MEMBERS_KEY] for reply in replies] == [second]


@pytest.mark.parametrize(
    ("threshold", "size", "needed"), [(3, 10, 3), (0.5, 5, 2), (0.5, 10, 5), (0.1, 10, 2), (1.0, 7, 7), (1, 7, 7)]
)
def test_the_threshold_is_flowers(threshold: float, size: int, needed: int) -> None:
    assert SecureAggregationTable(threshold=threshold).min_survivors(size) == needed


# What a client refuses to send, and what is said of clipping.


def test_an_update_that_is_not_finite_or_too_heavy_is_not_masked() -> None:
    (message,) = asked([1])
    (reply,) = answers([message])
    assert protocol().refusal_reason(reply.content, message.content) is None
    reply.content.metric_records["metrics"]["num-examples"] = LARGEST + 1
    expected = "it reported 41 examples, more than the 40 that weights are multiples of"
    assert protocol().refusal_reason(reply.content, message.content) == expected
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in BEFORE.items()}
    content = RecordDict({"arrays": make_record(broken), "metrics": MetricRecord({"num-examples": 3})})
    told = protocol().refusal_reason(content, message.content)
    assert told == "its 'weight' holds NaN or infinite values, and nobody could find them in the sum"


def test_numbers_beyond_the_clipping_range_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (reply,) = summed(protocol(clip=0.25), range(2), spread=1.0)
    beyond = sum(
        int((update_of(c, 1.0)[name].abs() * count_of(c) / LARGEST > 0.25).sum()) for c in range(2) for name in SHAPES
    )
    assert f"round 1: {beyond} of 32 numbers of weighted updates were beyond secure_aggregation.clip" in caplog.text
    weights = sum(map(count_of, range(2))) / LARGEST
    assert max(tensor.abs().max().item() for tensor in mean_in(reply).values()) <= 2 * 0.25 / weights + 1e-6


def test_what_is_drawn_does_not_touch_the_global_generators() -> None:
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.rand()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    summed(protocol(), range(3))
    assert np.random.rand() == expected  # noqa: NPY002


def test_the_arrays_are_those_of_an_array_record() -> None:
    (reply,) = summed(protocol(), range(3))
    (record,) = reply.content.array_records.values()
    assert isinstance(record, ArrayRecord)
    assert all(array.numpy().dtype == np.float32 for array in record.values())


def test_numbers_that_a_single_client_moved_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Both move bias, scale and a row of the weights, and client 2 another row alone."""
    messages, replies = asked([2, 5]), []
    for message, reply in zip(messages, answers(messages), strict=True):
        update = update_of(message.metadata.dst_node_id)
        update["weight"][2 if message.metadata.dst_node_id == 2 else 1 :] = 0
        reply.content["arrays"] = make_record(Payload.from_dense(update).arrays())
        replies.append(reply)
    with caplog.at_level(logging.WARNING):
        list(protocol(groups="all").sum_groups(replies, messages, ROUND))
    assert "clients 2, 5: 4 of 16 numbers of the sum were moved by one of them alone" in caplog.text
    assert "of client 2 these are 33.3 % of what it moved" in caplog.text


def test_where_all_move_all_nothing_is_said_of_lone_numbers(caplog: pytest.LogCaptureFixture) -> None:
    messages = asked([2, 5])
    with caplog.at_level(logging.WARNING):
        list(protocol(groups="all").sum_groups(answers(messages), messages, ROUND))
    assert "alone" not in caplog.text


@pytest.mark.parametrize(("factor", "count"), [(1.0, 0), (1e-9, LARGEST)])
def test_what_is_lost_by_weight_or_rounding_hides_nobody(
    factor: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 5 moves every number, but the sum hardly: all of them are those of client 2."""
    messages, replies = asked([2, 5]), []
    for message, reply in zip(messages, answers(messages), strict=True):
        if message.metadata.dst_node_id == 5:
            update = {name: factor * tensor for name, tensor in update_of(5).items()}
            reply.content["arrays"] = make_record(Payload.from_dense(update).arrays())
            reply.content["metrics"] = MetricRecord({"num-examples": count})
        replies.append(reply)
    with caplog.at_level(logging.WARNING):
        list(protocol(groups="all").sum_groups(replies, messages, ROUND))
    assert "clients 2, 5: 16 of 16 numbers of the sum were moved by one of them alone" in caplog.text
