"""What a strategy reads, and what is recorded, is decoded against the same message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.transcript import Transcript
from strategies.curious import Curious
from strategies.curious_grid import CuriousGrid

NODE = 7


pytestmark = pytest.mark.usefixtures("server_task")


def sent_message(weight: float) -> Message:
    arrays = make_record({"w": torch.full((2,), weight)})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    return Message(content, dst_node_id=NODE, message_type="train")


def delta_reply(message: Message, arrays: Mapping[str, torch.Tensor] | None = None) -> Message:
    arrays = Payload.from_dense({"w": torch.ones(2)}).arrays() if arrays is None else arrays
    metrics = MetricRecord({"num-examples": 3})
    return Message(RecordDict({"arrays": make_record(arrays), "metrics": metrics}), reply_to=message)


class ClusteredStrategy(FedAvg):
    """Strategy that sends each client the models of two clusters, and keeps the replies."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = [sent_message(0.0), sent_message(10.0)]
        self.read: list[Message] = []

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        return self.sent

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
        self.read = list(replies)
        return None, None


def weights_read(replies: Iterable[Message]) -> list[list[float]]:
    return [read_state(reply.content.array_records["arrays"])["w"].tolist() for reply in replies]


@pytest.mark.parametrize("rounds", [[1], []], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("arrive", [list, iter], ids=["at once", "one by one"])
def test_each_of_a_nodes_replies_is_decoded_against_the_message_that_it_answers(
    tmp_path: Path, rounds: list[int], arrive: Any
) -> None:
    strategy = ClusteredStrategy()
    curious = Curious(strategy, Recorder(tmp_path / "transcript", RecordingPlan(rounds=rounds)))
    sent = list(curious.configure_train(1, make_record({}), ConfigRecord(), None))  # type: ignore[arg-type]
    curious.aggregate_train(1, arrive([delta_reply(message) for message in sent]))
    assert weights_read(strategy.read) == [[1.0, 1.0], [11.0, 11.0]]
    if rounds:
        transcript = Transcript(tmp_path)
        recorded = [transcript.recorded_update(1, NODE, number) for number in (1, 2)]
        assert [update.after["w"].tolist() for update in recorded] == [[1.0, 1.0], [11.0, 11.0]]


class AnsweringGrid(Grid):
    """Grid whose only node answers each message with a delta."""

    def __init__(self, *arrays: dict[str, torch.Tensor]) -> None:
        self.arrays = list(arrays)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [NODE]

    def get_nodes(self) -> Iterable[Any]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.sent = list(messages)
        return ["first", "second"][: len(self.sent)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.send_and_receive(self.sent)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [delta_reply(message, *self.arrays) for message in messages]


def exchange_messages(grid: Grid, *, at_once: bool) -> list[Message]:
    messages = [sent_message(0.0), sent_message(10.0)]
    return list(grid.send_and_receive(messages) if at_once else grid.pull_messages(grid.push_messages(messages)))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_grid_decodes_replies_only_where_it_is_asked_to(tmp_path: Path, at_once: bool) -> None:
    with CuriousGrid(AnsweringGrid(), tmp_path / "decoded", decodes=True) as grid:
        assert weights_read(exchange_messages(grid, at_once=at_once)) == [[1.0, 1.0], [11.0, 11.0]]
    with CuriousGrid(AnsweringGrid(), tmp_path / "plain") as grid:
        for reply in exchange_messages(grid, at_once=at_once):
            assert list(reply.content.array_records["arrays"]) == ["delta/w"]


def test_a_payload_that_cannot_be_decoded_becomes_an_error(tmp_path: Path) -> None:
    with CuriousGrid(AnsweringGrid({"delta/w": torch.ones(3)}), tmp_path, decodes=True) as grid:
        replies = exchange_messages(grid, at_once=True)
    assert [reply.has_error() for reply in replies] == [True, True]
    assert "w" in str(replies[0].error.reason)


class LateGrid(AnsweringGrid):
    """Grid that answers with the reply of another node, to a message that nobody sent through it."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        stranger = sent_message(5.0)
        stranger.metadata.dst_node_id = 99
        return [delta_reply(stranger)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_grid_that_decodes_passes_no_encoded_reply_of_an_unknown_message_on(tmp_path: Path, at_once: bool) -> None:
    with CuriousGrid(LateGrid(), tmp_path, decodes=True) as grid:
        (reply,) = exchange_messages(grid, at_once=at_once)
    assert reply.has_error()
    assert "answers no message of this round" in str(reply.error.reason)


def test_a_grid_that_decodes_passes_no_encoded_reply_on_where_messages_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("bytes that are no message")

    monkeypatch.setattr("strategies.observer.Exchange", refuse)
    with CuriousGrid(AnsweringGrid(), tmp_path, decodes=True) as grid:
        replies = exchange_messages(grid, at_once=True)
    assert [reply.has_error() for reply in replies] == [True, True]


def test_an_encoded_reply_to_a_message_of_another_round_is_an_error(tmp_path: Path) -> None:
    """Nobody knows what it is a difference to; averaged as it is, it would spoil the model."""
    strategy = ClusteredStrategy()
    curious = Curious(strategy, tmp_path)
    curious.configure_train(1, make_record({}), ConfigRecord(), cast("Grid", None))
    stranger = sent_message(5.0)
    stranger.metadata.dst_node_id = 99
    curious.aggregate_train(1, [delta_reply(stranger), delta_reply(strategy.sent[0])])
    unknown, known = strategy.read
    assert unknown.has_error()
    assert "answers no message of this round" in str(unknown.error.reason)
    assert weights_read([known]) == [[1.0, 1.0]]
