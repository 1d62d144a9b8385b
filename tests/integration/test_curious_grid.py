"""Watched at the wire: whatever sits above the Grid, what passes is written down, and nothing is changed by it."""

from __future__ import annotations

import copy
import io
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedsim
from fedsim import Curious, CuriousGrid, Transcript
from fedsim.base.errors import ConfigError, RunError, TranscriptError
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.messages import RecordedExchange, read_messages
from tests.integration.test_curious import CLIENTS, STRATEGIES, Clients, federate, start_of

START = [np.arange(6, dtype=np.float32).reshape(2, 3) / 10, np.zeros(2, dtype=np.float32)]


class Wire(InProcessGrid):
    """Clients get messages of their own, as behind a real Grid: what they do to them reaches nobody."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            (number,) = super().push_messages([copy.deepcopy(message)])
            message.metadata.__dict__["_message_id"] = number
            ids.append(number)
        return ids


def messages_of(folder: Path) -> list[RecordedExchange]:
    return list(read_messages(folder / "run-1" / "messages"))


def a_record(value: float, kind: Any = np.float32) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(2, value, kind))})


def answering(reply: Callable[[int, Message], RecordDict], nodes: int = 3) -> Wire:
    """A wire to clients that answer anything with what `reply(partition, message)` gives."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return Message(reply(int(context.node_config["partition-id"]), message), reply_to=message)

    for register in (app.train(), app.evaluate(), app.query("stage")):
        register(answer)
    return Wire(app, nodes)


def asking(grid: Grid, content: RecordDict, kind: str = "train", group: str = "") -> list[Message]:
    return [Message(content, node, kind, group_id=group) for node in grid.get_node_ids()]


# The same with it and without it.


OF_OWN_STATE = {
    "FedAvg", "FedAvgM", "FedAdam", "QFedAvg", "Bulyan", "FedXgbBagging", "FedXgbCyclic",
    "DifferentialPrivacyServerSideAdaptiveClipping",
}  # fmt: skip
"""One of each kind that remembers something, or changes what it is given; and the plainest one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_OWN_STATE else pytest.mark.thorough) for name in STRATEGIES]
)
def test_aggregates_of_all_strategies_are_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    start = start_of(name)
    plain = federate(STRATEGIES[name](), Clients(failing=True), start)
    grid = CuriousGrid(InProcessGrid(Clients(failing=True).app, CLIENTS), tmp_path / "wire")
    assert federate(STRATEGIES[name](), Clients(failing=True), start, grid=grid) == plain
    grid.close()
    federate(Curious(STRATEGIES[name](), tmp_path / "strategy"), Clients(failing=True), start)
    assert Transcript(tmp_path / "wire").hash() == Transcript(tmp_path / "strategy").hash()


class OwnLoop(FedAvg):
    """A strategy with a round loop of its own, which passes the wrapper's methods by."""

    best = 0.5

    def start(self, grid: Grid, initial_arrays: ArrayRecord, rounds: int = 2) -> ArrayRecord:
        arrays = initial_arrays
        for number in range(1, rounds + 1):
            replies = grid.send_and_receive(self.configure_train(number, arrays, ConfigRecord(), grid), timeout=9)
            found, _ = self.aggregate_train(number, replies)
            arrays = found or arrays
        return arrays


def test_a_strategy_with_a_start_of_its_own_is_recorded(tmp_path: Path) -> None:
    start = ArrayRecord({name: Array(value) for name, value in start_of("FedAvg").items()})

    def final(strategy: Any) -> list[bytes]:
        random.seed(5)
        grid = InProcessGrid(Clients(False).app, CLIENTS)
        return [array.data for array in strategy.start(grid, start, rounds=3).values()]

    curious = Curious(OwnLoop(), tmp_path)
    assert final(curious) == final(OwnLoop())
    assert curious.best == 0.5
    assert copy.copy(curious).best == 0.5
    assert [len(list(Transcript(tmp_path).clients(number))) for number in (1, 2, 3)] == [CLIENTS] * 3


def test_evaluation_under_flowers_own_loop_is_recorded(tmp_path: Path) -> None:
    def reply(client: int, message: Message) -> RecordDict:
        count = {"num-examples": 4 + client, "losses": [0.5, float(client)]}
        if message.metadata.message_type == "evaluate":
            return RecordDict({"metrics": MetricRecord(count)})
        return RecordDict({"a": a_record(client), "m": MetricRecord({**count, "partition-id": 10 + client})})

    Curious(FedAvg(evaluate_metrics_aggr_fn=lambda replies, key: MetricRecord()), tmp_path).start(
        answering(reply), a_record(0), num_rounds=1
    )
    training, evaluation = messages_of(tmp_path)
    assert (training.kind, training.round, training.recorded_as) == ("train", 1, 1)
    assert [one.metrics["m"]["losses"] for one in training.replies] == [[0.5, 0.0], [0.5, 1.0], [0.5, 2.0]]
    assert (evaluation.kind, evaluation.round, evaluation.recorded_as) == ("evaluate", 1, 0)
    assert [one.client for one in evaluation.replies] == [10, 11, 12]  # as they called themselves when they trained
    assert evaluation.sent[0].arrays["arrays"] == {"w": "float32 (2,)"}
    assert Transcript(tmp_path).clients(1) == [10, 11, 12]


# Flower's legacy stack.


class Mover(NumPyClient):
    def __init__(self, client: int) -> None:
        self.client = client

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + 0.01 * (self.client + 1) for array in parameters], 10 + self.client, {"train_loss": 1.5}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(self.client), 5, {"accuracy": 0.5}


def legacy(main: ServerApp, *, mods: Any = (), out_in: int | None = None) -> None:
    """Run a legacy app over five clients; one of them fails in the collecting stage."""

    def build(context: Context) -> Any:
        client = Mover(int(context.node_config["partition-id"]))
        if client.client == out_in:
            client.fit = None  # type: ignore[assignment, method-assign]
        return client.to_client()

    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 (Flower's quantisation draws from there)
    grid = Wire(ClientApp(client_fn=build, mods=list(mods)), 5)
    main(grid, Context(1, 1, {}, RecordDict(), {}))


def legacy_strategy(found: list[Any]) -> LegacyFedAvg:
    class Strategy(LegacyFedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            results = sorted(results, key=lambda result: result[0].node_id)  # who is asked first is drawn by lot
            result = super().aggregate_fit(server_round, results, failures)
            found.append(result[0].tensors if result[0] else None)
            return result

    everyone: Any = {"min_fit_clients": 4, "min_evaluate_clients": 4, "min_available_clients": 5}
    return Strategy(initial_parameters=ndarrays_to_parameters(START), **everyone)


def test_a_legacy_server_fn_is_recorded_and_the_same_to_the_bit(tmp_path: Path) -> None:
    found: tuple[list[Any], list[Any]] = ([], [])
    for results, watched in zip(found, (False, True), strict=True):
        app = ServerApp(
            server_fn=lambda context, results=results: ServerAppComponents(  # type: ignore[misc]
                strategy=legacy_strategy(results), config=ServerConfig(num_rounds=2)
            )
        )
        legacy(fedsim.record_app(app, tmp_path) if watched else app)
    assert found[0] == found[1]
    assert len(found[0]) == 2
    transcript = Transcript(tmp_path)
    assert transcript.rounds == [1, 2]
    for update in transcript.updates():
        client = update.client - 2  # node ids of the in-process grid
        assert update.num_examples == 10 + client
        assert dict(update.metrics) == {"train_loss": 1.5}
        assert torch.allclose(update.after["0"] - update.before["0"], torch.tensor(0.01 * (client + 1)))
    evaluations = [one for one in messages_of(tmp_path) if one.kind == "evaluate"]
    assert [reply.metrics["evaluateres.loss"]["loss"] for reply in evaluations[0].replies] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "gone", [pytest.param(None, id="all answer", marks=pytest.mark.thorough), pytest.param(3, id="one drops out")]
)
def test_of_secure_aggregation_the_sum_is_recorded_and_no_client(gone: int | None, tmp_path: Path) -> None:
    found: tuple[list[Any], list[Any]] = ([], [])
    for results, watched in zip(found, (False, True), strict=True):
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context, results: list[Any] = results) -> None:
            rounds = LegacyContext(context, ServerConfig(num_rounds=1), legacy_strategy(results))
            DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2, timeout=9))(grid, rounds)

        legacy(fedsim.record_app(app, tmp_path) if watched else app, mods=[secaggplus_mod], out_in=gone)
    (tensors,), (plain,) = found[1], found[0]
    transcript = Transcript(tmp_path)
    (update,) = transcript.updates()
    clients = [client for client in range(5) if client != gone]
    assert update.members == tuple(client + 2 for client in clients)
    assert update.num_examples == sum(10 + client for client in clients)
    moved = sum((10 + client) * 0.01 * (client + 1) for client in clients) / update.num_examples
    for number, (name, before) in enumerate(update.before.items()):
        assert torch.equal(before, torch.from_numpy(START[number]))
        assert torch.allclose(update.after[name], before + moved, atol=1e-3)  # the clients quantise
        unmasked = np.load(io.BytesIO(tensors[number]))
        assert np.array_equal(update.after[name].numpy(), unmasked.astype(np.float32))
    assert np.allclose(np.load(io.BytesIO(plain[0])), np.load(io.BytesIO(tensors[0])), atol=1e-3)
    stages = messages_of(tmp_path)[:4]
    masked = stages[2].replies[0]
    assert masked.metrics["fitres.num_examples"] == {"num_examples": 10}
    assert masked.config["fitres.metrics"] == {"train_loss": 1.5}
    assert masked.config["secaggplus_configs"]["masked_params"][0].dtype == np.uint8
    assert all(stage.recorded_as == 0 for stage in stages)


def test_a_sum_that_nobody_can_unmask_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        rounds = LegacyContext(context, ServerConfig(num_rounds=1), legacy_strategy([]))
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2, timeout=9))(grid, rounds)

    def silent(message: Message, context: Context, call_next: Any) -> Message:
        if message.content.config_records.get("secaggplus_configs", {}).get("stage") == "unmask":
            raise RuntimeError("gone")
        reply: Message = call_next(message, context)
        return reply

    with suppress(Exception):  # Flower's workflow ends with an error of its own
        legacy(fedsim.record_app(app, tmp_path), mods=[silent, secaggplus_mod])
    with pytest.raises(TranscriptError, match="holds no recording of updates, but"):
        Transcript(tmp_path)
    assert "the sum of a group is not recorded: ValueError: 0 shares of client 2 came back, 2 are needed" in caplog.text


# A loop of one's own.


def test_messages_are_matched_whenever_they_come_and_written_down_when_they_are_complete(tmp_path: Path) -> None:
    grid = CuriousGrid(
        answering(lambda client, message: RecordDict({"a": a_record(client), "m": MetricRecord({"num-examples": 5})})),
        tmp_path,
    )
    config = ConfigRecord({"lr": 0.5})
    first = list(grid.push_messages(asking(grid, RecordDict({"a": a_record(0), "c": config}), group="1")))
    config["lr"] = 0.25  # as servers do that lower the rate from round to round
    second = list(grid.push_messages(asking(grid, RecordDict({"a": a_record(1), "c": config}), group="2")))
    list(grid.pull_messages([first[0], second[2]]))
    list(grid.pull_messages([second[0], second[1]]))
    assert Transcript(tmp_path).rounds == [2]
    list(grid.pull_messages([first[1]]))
    grid.close()
    transcript = Transcript(tmp_path)
    assert transcript.rounds == [1, 2]
    assert [transcript.header(number).config["lr"] for number in (1, 2)] == [0.5, 0.25]
    assert transcript.clients(1) == [2, 3]
    assert transcript.header(1).failures == {}  # nobody asked for the reply of client 4


def test_a_round_that_is_told_twice_is_counted_on(tmp_path: Path) -> None:
    """As of a loop that trains twice a round, or says nothing of rounds."""
    grid = CuriousGrid(
        answering(lambda client, message: RecordDict({"a": a_record(client), "m": MetricRecord({"num-examples": 5})})),
        tmp_path,
    )
    for group in ("1", "1", "2", "2", ""):
        list(grid.send_and_receive(asking(grid, RecordDict({"a": a_record(0)}), group=group)))
    assert Transcript(tmp_path).rounds == [1, 2, 3, 4, 5]


def test_several_records_of_arrays_are_kept_and_read_as_the_auditor_says(tmp_path: Path) -> None:
    """As SCAFFOLD sends them: weights, and the client's control variate."""

    def reply(client: int, message: Message) -> RecordDict:
        sent = float(message.content.array_records["arrays"]["w"].numpy()[0])
        records = {"arrays": a_record(sent + client), "control": a_record(0.5), "m": MetricRecord({"num-examples": 5})}
        return RecordDict(records)

    with CuriousGrid(answering(reply), tmp_path) as grid:
        content = RecordDict({"arrays": a_record(1), "control": a_record(9)})
        list(grid.send_and_receive(asking(grid, content)))
    expected = (
        "round 1, client 2: the server sent the records of arrays 'arrays', 'control', and which of them holds the "
        r"model is not said; name one with \[app\] record"
    )
    with pytest.raises(TranscriptError, match=expected):
        Transcript(tmp_path).update(1, 2)
    for record, before, after in (("arrays", 1.0, 2.0), ("control", 9.0, 0.5)):
        update = Transcript(tmp_path, message_format=MessageFormat(record=record)).update(1, 3)
        assert (update.before["w"].tolist(), update.after["w"].tolist()) == ([before] * 2, [after] * 2)
    with pytest.raises(TranscriptError, match="none is called 'weights'"):
        Transcript(tmp_path, message_format=MessageFormat(record="weights")).update(1, 3)
    Transcript(tmp_path).hash()


def test_queries_and_what_else_clients_say_are_kept_as_they_said_it(tmp_path: Path) -> None:
    def reply(client: int, message: Message) -> RecordDict:
        said = ConfigRecord({"key": b"\x00\xff", "many": [b"a", b""], "words": ["x", "y"], "n": 3, "sure": True})
        return RecordDict({"c": said, "m": MetricRecord({"list": [1, 2]}), "a": a_record(client, np.int64)})

    with CuriousGrid(answering(reply), tmp_path) as grid:
        list(grid.send_and_receive(asking(grid, RecordDict({"q": ConfigRecord({"what": "all"})}), "query.stage")))
    (asked,) = messages_of(tmp_path)
    assert (asked.kind, asked.number, asked.recorded_as) == ("query.stage", 1, 0)
    assert [one.config["q"]["what"] for one in asked.sent] == ["all"] * 3
    said = asked.replies[2]
    assert bytes(said.config["c"]["key"]) == b"\x00\xff"
    assert [bytes(part) for part in said.config["c"]["many"]] == [b"a", b""]
    assert (said.config["c"]["words"], said.config["c"]["n"], said.config["c"]["sure"]) == (["x", "y"], 3, True)
    assert said.metrics["m"]["list"] == [1, 2]
    assert said.arrays["a"]["w"].tolist() == [2, 2]
    with pytest.raises(TranscriptError, match="holds no recording"):
        Transcript(tmp_path)


# Nothing stops the federation.


def test_what_cannot_be_read_is_written_down_as_such_and_the_federation_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [
        RecordDict({"a": a_record(1)}),  # no metrics
        RecordDict({"a": ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"nonsense")})}),
        RecordDict({"a": ArrayRecord({"w": Array(np.array(["x", "y"]))}), "m": MetricRecord({"num-examples": 1})}),
        RecordDict({"a": ArrayRecord({"v": Array(np.zeros(3, np.float32))}), "m": MetricRecord({"num-examples": 1})}),
        RecordDict({"m": MetricRecord({"num-examples": 1})}),
        RecordDict(),
    ]
    with CuriousGrid(answering(lambda client, message: odd[client], len(odd)), tmp_path) as grid:
        replies = list(grid.send_and_receive(asking(grid, RecordDict({"a": a_record(0)}))))
    assert [reply.content for reply in replies] == odd
    transcript = Transcript(tmp_path)
    assert {u.client: u.num_examples for u in transcript.updates()} == {2: 0, 5: 1}
    failures = transcript.header(1).failures
    assert failures[3].startswith("it sent 'w', which cannot be read: ")
    assert "cannot be" in failures[4]
    (all_of_it,) = messages_of(tmp_path)
    assert len(all_of_it.replies) == len(odd)


def test_arrays_of_the_server_that_cannot_be_read_are_said_once_and_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"nonsense")})
    with CuriousGrid(answering(lambda client, message: RecordDict()), tmp_path) as grid:
        assert len(list(grid.send_and_receive(asking(grid, RecordDict({"a": broken}))))) == 3
    assert caplog.text.count("fedsim: the server sent 'w', which cannot be read: ") == 1
    (messages,) = messages_of(tmp_path)
    assert len(messages.replies) == 3


def test_numbers_of_the_server_that_no_recording_can_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = CuriousGrid(
        answering(lambda client, message: RecordDict({"m": MetricRecord({"num-examples": 5})})), tmp_path
    )
    with grid:
        list(grid.send_and_receive(asking(grid, RecordDict({"a": a_record(1, np.complex128)}))))
    assert "the server sent 'w' as torch.complex128, which cannot be recorded" in caplog.text
    assert [reply.metrics["m"]["num-examples"] for reply in messages_of(tmp_path)[0].replies] == [5, 5, 5]


def test_a_disk_that_cannot_be_written_is_said_and_the_federation_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RunError("round-000001: cannot be written (No space left on device); make room")

    monkeypatch.setattr("fedsim.recording.recorder.Recorder.write", full)
    start = ArrayRecord({name: Array(value) for name, value in start_of("FedAvg").items()})
    result = Curious(FedAvg(fraction_evaluate=0.0), tmp_path).start(
        InProcessGrid(Clients(False).app, CLIENTS), start, num_rounds=2
    )
    assert len(result.train_metrics_clientapp) == 2
    assert caplog.text.count("are not recorded: round-000001: cannot be written (No space left on device)") == 2


def test_a_folder_that_cannot_be_made_is_an_error_before_the_federation_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file: cannot be written"):
        CuriousGrid(Wire(ClientApp(), 1), tmp_path / "file")


def test_flowers_log_says_where_the_recording_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr")
    for number in (1, 2):
        CuriousGrid(Wire(ClientApp(), 1), tmp_path / "recording")
        assert f"is recorded in {(tmp_path / 'recording').resolve()}/run-{number}" in caplog.text


# Whatever comes when.


class Slow(Grid):
    """Replies come when the test says so; each is the broadcast and the node's id."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.lost = set[str]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.sent))
            self.sent.append(message)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.reply(self.sent[int(number)]) for number in message_ids if number not in self.lost]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        (record,) = message.content.array_records.values()
        moved = ArrayRecord({"w": Array(record["w"].numpy() + node)})
        return Message(RecordDict({"a": moved, "m": MetricRecord({"num-examples": node})}), reply_to=message)

    create_message = get_node_ids = get_nodes = set_run = None  # type: ignore[assignment]
    run = None  # type: ignore[assignment]


Slow.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def one(node: int, round: int, kind: str = "train") -> Message:
    return Message(RecordDict({"a": a_record(100 * round)}), node, kind, group_id=str(round))


def read_moves(folder: Path, run: str = "run-1") -> dict[tuple[int, int], float]:
    """By round and client, what it moved by."""
    updates = Transcript(folder / run).updates()
    return {(u.round, u.client): float((u.after["w"] - u.before["w"])[0]) for u in updates}


def failures(folder: Path) -> dict[int, dict[int, str]]:
    transcript = Transcript(folder / "run-1")
    return {number: dict(told) for number in transcript.rounds if (told := transcript.header(number).failures)}


def test_an_asynchronous_loop_loses_no_reply(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CuriousGrid(Slow(), tmp_path) as grid:
        for node in (2, 3, 4):
            grid.push_messages([one(node, 1)])
        grid.pull_messages(["0"])
        grid.push_messages([one(2, 2)])
        grid.push_messages([one(3, 1, "query")])
        grid.pull_messages(["1", "2", "3", "4"])
    assert read_moves(tmp_path) == {(1, 2): 2, (1, 3): 3, (1, 4): 4, (2, 2): 2}
    assert failures(tmp_path) == {}
    assert "is not recorded" not in caplog.text


def test_threads_that_send_and_receive_in_different_rounds(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)

    class Together(Slow):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            barrier.wait(20)
            return super().pull_messages(message_ids)

    with CuriousGrid(Together(), tmp_path) as grid:
        threads = [
            threading.Thread(target=grid.send_and_receive, args=([one(*to)],)) for to in ((2, 1), (3, 1), (4, 2))
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
    assert read_moves(tmp_path) == {(1, 2): 2, (1, 3): 3, (2, 4): 4}
    assert failures(tmp_path) == {}


def test_stragglers_do_not_keep_all_rounds_in_memory(tmp_path: Path) -> None:
    inner = Slow()
    grid = CuriousGrid(inner, tmp_path)
    first = list[str]()
    for number in range(12):
        pushed = list(grid.push_messages([one(2, number + 1), one(3, number + 1)]))
        first = first or pushed[1:]
        inner.lost |= set(pushed[1:])
        grid.pull_messages(pushed)
    assert failures(tmp_path) == {number: {3: "no reply"} for number in (1, 2, 3, 4)}
    inner.lost.clear()
    grid.pull_messages(first)
    assert grid.losses == ["a reply of node 3 is not recorded, because what it answers is closed"]
    grid.close()
    assert len(failures(tmp_path)) == 12


def test_a_reply_that_comes_twice_and_one_that_the_superlink_gives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Slow):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            first, _, third = super().pull_messages(message_ids)
            gone = Message(Error(1, "it expired"), reply_to=self.sent[1])
            gone.metadata.__dict__["_src_node_id"] = 1  # as the SuperLink itself says so
            empty = copy.copy(third)
            empty.__dict__["_content"] = None
            return [first, first, gone, empty]

    with CuriousGrid(Odd(), tmp_path) as grid:
        assert len(list(grid.send_and_receive([one(node, 1) for node in (2, 3, 4)]))) == 4
    assert read_moves(tmp_path) == {(1, 2): 2}
    assert failures(tmp_path) == {1: {3: "it expired", 4: "neither content nor an error"}}
    assert "node 2 answered more than once; its first answer is recorded" in caplog.text


def test_numbers_too_large_for_a_float_and_names_that_are_taken(tmp_path: Path) -> None:
    class Odd(Slow):
        def reply(self, message: Message) -> Message:
            reply = super().reply(message)
            node = message.metadata.dst_node_id
            reply.content["m"] = MetricRecord({"num-examples": 10**400, "partition-id": 3} if node == 2 else {"x": 0.5})
            return reply

    with CuriousGrid(Odd(), tmp_path) as grid:
        grid.send_and_receive([Message(one(2, 1).content, n, "train", group_id="9" * 5000) for n in (2,)])
        grid.send_and_receive([one(2, 2), one(3, 2)])
    found = read_moves(tmp_path)
    assert [found[1, 3], found[2, 3]] == [2, 2]
    assert sorted(found.values()) == [2, 2, 3]


def test_arrays_in_another_order_of_bytes_are_kept(tmp_path: Path) -> None:
    reply = RecordDict({"a": a_record(7, ">f4"), "m": MetricRecord({"num-examples": 5})})
    with CuriousGrid(answering(lambda client, message: reply), tmp_path) as grid:
        list(grid.send_and_receive(asking(grid, RecordDict())))
    (messages,) = messages_of(tmp_path)
    assert float(messages.replies[0].arrays["a"]["w"][0]) == 7


def test_queries_with_arrays_are_no_rounds(tmp_path: Path) -> None:
    with CuriousGrid(Slow(), tmp_path) as grid:
        grid.send_and_receive([one(2, 1, "query"), one(3, 1, "query")])
        grid.send_and_receive([one(2, 1), one(3, 1)])
    assert read_moves(tmp_path) == {(1, 2): 2, (1, 3): 3}
    assert [messages.kind for messages in messages_of(tmp_path)] == ["query"]


def test_a_grid_can_be_copied(tmp_path: Path) -> None:
    assert isinstance(copy.copy(CuriousGrid(Slow(), tmp_path)).grid, Slow)


def test_each_start_of_a_strategy_has_a_run_of_its_own(tmp_path: Path) -> None:
    strategy = Curious(FedAvg(fraction_evaluate=0.0), tmp_path)
    start = ArrayRecord({name: Array(value) for name, value in start_of("FedAvg").items()})
    for rounds in (2, 1):
        strategy.start(InProcessGrid(Clients(False).app, CLIENTS), start, num_rounds=rounds)
    assert [Transcript(tmp_path / run).rounds for run in ("run-1", "run-2")] == [[1, 2], [1]]


def test_settings_of_a_wrapped_strategy_can_be_changed(tmp_path: Path) -> None:
    strategy = Curious(FedAvg(), tmp_path)
    strategy.fraction_train = 0.5  # type: ignore[attr-defined]
    assert strategy.strategy.fraction_train == 0.5  # type: ignore[attr-defined]
    strategy.summary = mine = lambda: None  # type: ignore[method-assign]
    assert strategy.strategy.summary != mine


def test_a_legacy_strategy_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"legacy API; wrap the ServerApp with fedsim.record_app, or the Grid"):
        Curious(LegacyFedAvg(), tmp_path)  # type: ignore[arg-type]
