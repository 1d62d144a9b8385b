"""A strategy that averages gets means of many replies, any other gets each of them."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from torch import Tensor

from fedsim.federation.engines.arrays import ReplyRecords, ReplySpool, make_record, read_state
from strategies.reply_means import ReplyCollector

pytestmark = pytest.mark.usefixtures("server_task")
WEIGHTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make_messages(count: int) -> list[Message]:
    content = RecordDict({"arrays": make_record({"w": torch.zeros(2)})})
    return [Message(content, dst_node_id=client, message_type="train") for client in range(count)]


def make_replies(messages: list[Message]) -> list[Message]:
    replies: list[Message] = []
    for client, message in enumerate(messages):
        arrays = make_record({"w": torch.tensor([client, -1.0 / (1 + client)])})
        metrics = MetricRecord({"num-examples": WEIGHTS[client], "loss": client / 7})
        replies.append(Message(ReplyRecords({"arrays": arrays, "metrics": metrics}), reply_to=message))
    return replies


def collect(strategy: Strategy, replies: list[Message], messages: list[Message], limit: float) -> list[Message]:
    collector = ReplyCollector(strategy, messages, limit, groups_from=limit)
    for reply in replies:
        collector.add(reply)
    return collector.take()


def aggregate(replies: list[Message]) -> tuple[Tensor, float]:
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    return read_state(arrays)["w"], float(metrics["loss"])  # type: ignore[arg-type]


def test_the_mean_of_means_is_the_mean() -> None:
    messages = make_messages(len(WEIGHTS))
    replies = make_replies(messages)
    means = collect(FedAvg(), replies, messages, limit=0)
    assert len(means) == math.ceil(len(WEIGHTS) / 3)
    weights = [reply.content.metric_records["metrics"]["num-examples"] for reply in means]
    assert weights == [8, 15, 13, 8]

    of_means, loss_of_means = aggregate(means)
    of_all, loss = aggregate(replies)
    assert torch.allclose(of_means, of_all, rtol=1e-6)
    assert loss_of_means == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_a_mean_of_all_replies_has_the_bits_of_flowers(dtype: torch.dtype) -> None:
    messages = make_messages(len(WEIGHTS))
    replies: list[Message] = []
    for client, message in enumerate(messages):
        values = (100 * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(client))).to(dtype)
        arrays = make_record({"w": values, "scalar": torch.tensor(client, dtype=dtype)})
        metrics = MetricRecord({"num-examples": WEIGHTS[client], "loss": client / 7})
        replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
    collector = ReplyCollector(FedAvg(), messages, limit=0)
    for reply in replies:
        collector.add(reply)
    (mean,) = collector.take()
    means, metrics_of_mean = FedAvg().aggregate_train(1, [mean])
    expected, expected_metrics = FedAvg().aggregate_train(1, replies)
    assert means is not None
    assert expected is not None
    assert metrics_of_mean == expected_metrics
    for name, array in expected.items():
        assert (means[name].dtype, means[name].shape) == (array.dtype, array.shape)
        assert means[name].numpy().tobytes() == array.numpy().tobytes()


def test_up_to_the_limit_a_strategy_gets_all_replies() -> None:
    messages = make_messages(len(WEIGHTS))
    replies = make_replies(messages)
    total = len(WEIGHTS) * 2 * 4
    assert collect(FedAvg(), replies, messages, limit=total) == replies
    assert len(collect(FedAvg(), replies, messages, limit=total - 1)) < len(replies)


class FirstReply(FedAvg):
    """A strategy that may do anything with single replies."""


@pytest.mark.parametrize(
    "strategy", [FedMedian(), FirstReply(), FedAvg(train_metrics_aggr_fn=lambda *_: MetricRecord())]
)
def test_a_strategy_that_may_need_single_replies_gets_them(strategy: Strategy) -> None:
    messages = make_messages(len(WEIGHTS))
    replies = make_replies(messages)
    assert collect(strategy, replies, messages, limit=0) == replies


def test_errors_are_in_no_mean() -> None:
    messages = make_messages(4)
    replies = make_replies(messages)
    replies[1] = Message(Error(code=2, reason="it failed"), reply_to=messages[1])
    collected = collect(FedAvg(), replies, messages, limit=0)
    assert sum(reply.has_error() for reply in collected) == 1
    counts = [reply.content.metric_records["metrics"]["num-examples"] for reply in collected if reply.has_content()]
    assert counts == [3 + 4, 1]


def test_records_of_a_reply_are_sorted_by_type_and_change_with_it() -> None:
    (message,) = make_messages(1)
    (reply,) = make_replies([message])
    assert list(reply.content.array_records) == ["arrays"]
    assert list(reply.content.metric_records) == ["metrics"]
    assert not reply.content.config_records
    reply.content.array_records["more"] = ArrayRecord()
    assert set(reply.content) == {"arrays", "metrics", "more"}
    del reply.content.array_records["more"]
    assert set(reply.content) == {"arrays", "metrics"}
    with pytest.raises(TypeError, match="expected ArrayRecord, got MetricRecord"):
        reply.content.array_records["more"] = MetricRecord()  # type: ignore[assignment]


def test_a_reply_that_nobody_refers_to_is_gone_and_leaves_its_room() -> None:
    spool = ReplySpool(None, limit=8)
    (message,) = make_messages(1)
    for _ in range(3):
        (reply,) = make_replies([message])
        assert len(reply.content.array_records) == len(reply.content.metric_records) == 1
        record = reply.content["arrays"]
        assert isinstance(record, ArrayRecord)
        spool.store(record)
        assert record["w"].is_in_memory  # type: ignore[attr-defined]
        gone = weakref.ref(record)
        del reply, record
        assert gone() is None
