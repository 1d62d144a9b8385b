"""Many logical clients over few nodes: a strategy cannot tell the difference."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsim.federation.engines.cohort
from fedsim.federation.engines.arrays import LazyArray
from fedsim.federation.engines.cohort import COHORT_MESSAGE_TYPE, CohortGrid
from fedsim.federation.engines.node import play_cohort
from fedsim.federation.engines.ray import node_count
from fedsim.federation.engines.serial import InProcessGrid

SECRET = ConfigRecord({"experiment": "what no server would know"})


class Counting(InProcessGrid):
    """A physical grid that keeps what was sent, answers backwards, and may lose nodes."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes)
        self.sent: list[Message] = []
        self.silent: set[int] = set()
        self.dead: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        names = list(super().push_messages(messages))
        for message, name in zip(messages, names, strict=True):
            self.sent.append(message)
            if message.metadata.dst_node_id in self.dead:
                self._replies[name] = Message(Error(code=2, reason="actor died"), reply_to=message)
            elif message.metadata.dst_node_id in self.silent:
                del self._replies[name]
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages([name for name in message_ids if name in self._replies][-1:])


def make(clients: int, nodes: int, train: Any = None) -> tuple[CohortGrid, Counting]:
    app = ClientApp()

    def default(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client == 13:
            raise ValueError("bad luck")
        arrays = message.content.array_records["arrays"]["w"].numpy() + client
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(arrays)}),
                "metrics": MetricRecord(
                    {"num-examples": 10 + client, "all": int(context.node_config["num-partitions"])}
                ),
            }
        )
        return Message(content, reply_to=message)

    app.train()(train or default)
    app.query(COHORT_MESSAGE_TYPE.split(".")[1])(lambda message, context: play_cohort(app, message, context))
    physical = Counting(app, nodes)
    return CohortGrid(physical, clients, SECRET, list(physical.get_node_ids())), physical


def app_that_notes_groups() -> tuple[ClientApp, list[list[int]]]:
    """An app whose clients answer together, and the groups in which they do."""
    app, groups = ClientApp(), list[list[int]]()

    @app.query(COHORT_MESSAGE_TYPE.split(".")[1])
    def cohort(message: Message, context: Context) -> Message:
        def ahead(message: Message, group: Sequence[int]) -> dict[int, Any]:
            groups.append(list(group))
            return {client: {"metrics": MetricRecord({"client": client})} for client in group}

        return play_cohort(app, message, context, ahead)

    return app, groups


def content(value: float = 0.0) -> RecordDict:
    return RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.full(3, value, np.float32))}), "config": ConfigRecord({"lr": 0.1})}
    )


def broadcast(clients: Iterable[int], payload: RecordDict | None = None) -> list[Message]:
    shared = payload or content()
    return [Message(shared, client, "train") for client in clients]


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
def test_every_client_answers_for_itself_in_the_order_of_ids(nodes: int) -> None:
    grid, _ = make(clients=7, nodes=nodes)
    replies = list(grid.send_and_receive(broadcast([5, 0, 6, 2])))
    assert [reply.metadata.src_node_id for reply in replies] == [0, 2, 5, 6]
    for reply in replies:
        client = reply.metadata.src_node_id
        assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [client] * 3
        assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 10 + client, "all": 7}


def test_one_broadcast_travels_once_a_node() -> None:
    grid, physical = make(clients=10, nodes=2)
    list(grid.send_and_receive(broadcast(range(10))))
    assert len(physical.sent) == 2
    assert sorted(list(m.content.config_records["cohort"]["clients"]) for m in physical.sent) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_clients_who_are_sent_different_things_get_what_is_theirs() -> None:
    grid, physical = make(clients=4, nodes=2)
    messages = broadcast([0, 1], content(10.0)) + broadcast([2, 3], content(20.0))
    replies = list(grid.send_and_receive(messages))
    values = [float(reply.content.array_records["arrays"]["w"].numpy()[0]) for reply in replies]
    assert values == [10, 11, 22, 23]
    assert len(physical.sent) == 4


def test_packing_and_unpacking_lose_nothing_of_a_reply() -> None:
    rich = RecordDict(
        {
            "arrays": ArrayRecord({"a/b": Array(np.array(3.0)), "empty": Array(np.empty((0, 2)))}),
            "more/metrics": MetricRecord({"x": 1, "y": [0.5, 2.5]}),
            "config": ConfigRecord({"text": "ä", "raw": b"\x00\x01"}),
        }
    )
    grid, _ = make(clients=2, nodes=1, train=lambda message, context: Message(rich, reply_to=message))
    for reply in grid.send_and_receive(broadcast([0, 1])):
        assert dict(reply.content) == dict(rich)


def test_who_raises_fails_alone() -> None:
    grid, _ = make(clients=15, nodes=2)
    replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(broadcast([11, 13, 14]))}
    assert replies[13].has_error()
    assert "bad luck" in str(replies[13].error.reason)
    assert not replies[11].has_error()
    assert not replies[14].has_error()


@pytest.mark.parametrize("answer", ["error", "nothing"])
def test_who_answers_with_an_error_or_with_nothing_fails_alone(answer: str) -> None:
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            error = Message(Error(code=7, reason="declined"), reply_to=message)
            return error if answer == "error" else Message(RecordDict(), reply_to=message)
        return Message(RecordDict({"metrics": MetricRecord({"n": 1})}), reply_to=message)

    grid, _ = make(clients=3, nodes=1, train=train)
    zero, one, two = grid.send_and_receive(broadcast([0, 1, 2]))
    assert not zero.has_error()
    assert not two.has_error()
    assert one.has_error()
    assert answer == "nothing" or "declined" in str(one.error.reason)


def test_others_do_the_work_of_a_dead_node_and_the_clients_of_a_silent_one_have_error_replies() -> None:
    grid, physical = make(clients=6, nodes=3)
    dead, silent, alive = list(physical.get_node_ids())
    physical.dead, physical.silent = {dead}, {silent}
    replies = list(grid.send_and_receive(broadcast(range(6)), timeout=0.2))
    reasons = {r.metadata.src_node_id: r.error.reason for r in replies if r.has_error()}
    assert reasons == {2: "no reply in time", 3: "no reply in time"}
    assert [r.metadata.src_node_id for r in replies] == list(range(6))
    assert alive is not None


def test_what_only_the_simulation_knows_stays_out_of_the_strategys_messages() -> None:
    seen: list[Any] = []

    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content.config_records["simulation"]))
        assert "cohort" not in message.content
        return Message(RecordDict({"metrics": MetricRecord({"n": 1})}), reply_to=message)

    grid, _ = make(clients=2, nodes=1, train=train)
    messages = broadcast([0, 1])
    replies = list(grid.send_and_receive(messages))
    assert seen == [dict(SECRET)] * 2
    assert set(messages[0].content) == {"arrays", "config"}
    assert all(set(reply.content) == {"metrics"} for reply in replies)


def test_a_client_that_writes_into_its_message_does_not_reach_the_others() -> None:
    def train(message: Message, context: Context) -> Message:
        seen = "mark" in message.content
        message.content["mark"] = ConfigRecord({"was": "here"})
        return Message(RecordDict({"metrics": MetricRecord({"seen": int(seen)})}), reply_to=message)

    grid, _ = make(clients=3, nodes=1, train=train)
    messages = broadcast([0, 1, 2])
    assert [reply.content.metric_records["metrics"]["seen"] for reply in grid.send_and_receive(messages)] == [0, 0, 0]
    assert set(messages[0].content) == {"arrays", "config"}


def test_a_broadcast_is_parsed_once_a_message_and_stays_as_the_server_holds_it() -> None:
    seen = []

    def train(message: Message, context: Context) -> Message:
        seen.append(message.content.array_records["arrays"]["w"])
        return Message(RecordDict({"metrics": MetricRecord({"n": 1})}), reply_to=message)

    grid, _ = make(clients=3, nodes=1, train=train)
    messages = broadcast([0, 1, 2])
    list(grid.send_and_receive(messages))
    assert len(seen) == 3
    assert {id(array) for array in seen} == {id(seen[0])}
    assert isinstance(seen[0], LazyArray)
    assert type(messages[0].content.array_records["arrays"]["w"]) is Array


def test_pushing_and_pulling_gives_the_same_as_sending() -> None:
    grid, _ = make(clients=5, nodes=2)
    ids = list(grid.push_messages(broadcast([3, 1, 4])))
    assert len(set(ids)) == 3
    pulled = list(grid.pull_messages(ids))
    assert [m.metadata.src_node_id for m in pulled] == [1, 3, 4]
    assert list(grid.pull_messages(ids)) == []


def test_logical_ids_are_partition_ids() -> None:
    grid, physical = make(clients=5, nodes=2)
    assert list(grid.get_node_ids()) == [0, 1, 2, 3, 4]
    assert isinstance(grid, Grid)
    assert grid.run is physical.run


def test_asking_nobody_asks_nobody() -> None:
    grid, physical = make(clients=3, nodes=1)
    assert list(grid.send_and_receive([])) == []
    assert physical.sent == []


@pytest.mark.parametrize(("actors", "clients", "nodes"), [(1, 10, 2), (4, 10, 8), (8, 10, 10), (2, 1, 1)])
def test_there_are_never_more_nodes_than_clients(actors: int, clients: int, nodes: int) -> None:
    assert node_count(actors, clients) == nodes


def test_an_exception_in_process_is_an_error_reply() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise KeyError("missing")

    grid = InProcessGrid(app, nodes=2)
    node = list(grid.get_node_ids())[1]
    (reply,) = grid.send_and_receive([Message(content(), node, "train")])
    assert reply.has_error()
    assert reply.metadata.src_node_id == node
    assert "missing" in str(reply.error.reason)


# Replies stream: small messages, a window of them, and whatever nodes do.


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_SHORTEST_WAIT", 0.0001)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_LONGEST_WAIT", 0.001)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_PAUSES", (0.0, 0.0))


class Slow(Counting):
    """Answers lie in the node for a random number of pulls and come in any order; notes how many are about."""

    def __init__(self, app: ClientApp, nodes: int, seed: int = 0) -> None:
        super().__init__(app, nodes)
        self.rng = random.Random(seed)
        self.delays: dict[str, int] = {}
        self.longest = dict.fromkeys(self.get_node_ids(), 4)
        self.refusing: dict[int, list[Any]] = {}
        self.refused: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        node = message.metadata.dst_node_id
        if node in self.refusing:
            self.refused.append(node)
            return self.refusing[node]
        (name,) = super().push_messages([message])
        self.delays[name] = self.rng.randint(0, self.longest[node])
        return [name]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = list(message_ids)
        for name in asked:
            self.delays[name] -= 1
        ready = [name for name in asked if self.delays[name] < 0]
        self.rng.shuffle(ready)
        return InProcessGrid.pull_messages(self, ready)


def slow(
    clients: int, nodes: int, *, together: int = 1, seed: int = 0, parking: Path | None = None
) -> tuple[CohortGrid, Slow]:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]["w"].numpy() + int(context.node_config["partition-id"])
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(arrays)})}), reply_to=message)

    app.query(COHORT_MESSAGE_TYPE.split(".")[1])(lambda message, context: play_cohort(app, message, context))
    physical = Slow(app, nodes, seed)
    ids = list(physical.get_node_ids())
    return CohortGrid(physical, clients, SECRET, ids, group_size=together, spool_folder=parking), physical


def sent_to(physical: Counting) -> list[list[int]]:
    return [[int(c) for c in m.content.config_records["cohort"]["clients"]] for m in physical.sent]


def failed(replies: Iterable[Message]) -> dict[int, str | None]:
    return {reply.metadata.src_node_id: reply.error.reason for reply in replies if reply.has_error()}


@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize(("size", "messages"), [(1, 20), (24, 10), (12 * 7, 3), (1 << 20, 1)])
def test_small_messages_are_many_and_say_the_same(
    nodes: int, size: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", size)  # a client's arrays take 12 bytes
    grid, physical = slow(20, nodes)
    replies = list(grid.send_and_receive(broadcast(range(20))))
    assert [reply.metadata.src_node_id for reply in replies] == list(range(20))
    assert [float(reply.content.array_records["arrays"]["w"].numpy()[0]) for reply in replies] == list(range(20))
    assert len(physical.sent) == max(messages, nodes)
    assert sorted(client for clients in sent_to(physical) for client in clients) == list(range(20))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_nodes_do_not_wait_for_the_slowest_and_what_they_send_waits_on_disk(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    monkeypatch.setattr(fedsim.federation.engines.cohort, "default_reply_memory", lambda num_bytes: 0)
    nodes = 1 + seed % 4
    grid, physical = slow(40, nodes, seed=seed, parking=tmp_path)
    physical.longest[min(physical.longest)] = 30
    early, waited = [], []
    for taken, reply in enumerate(grid.send_and_receive(broadcast(range(40)))):
        early.append(len(physical.sent) - taken)
        waited.append(not reply.content.array_records["arrays"]["w"].is_in_memory)
    assert len(early) == 40
    assert not waited[0], "whoever comes in turn is handed over from memory"
    assert (max(early) > 2 * nodes) == any(waited) == (nodes > 1)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_node_has_one_message_at_a_time(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = slow(30, nodes)
    busy: set[int] = set()
    push, pull = physical.push_messages, physical.pull_messages

    def pushed(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            assert message.metadata.dst_node_id not in busy
            busy.add(message.metadata.dst_node_id)
        return push(messages)

    def pulled(names: Iterable[str]) -> Iterable[Message]:
        answers = list(pull(names))
        busy.difference_update(answer.metadata.src_node_id for answer in answers)
        return answers

    monkeypatch.setattr(physical, "push_messages", pushed)
    monkeypatch.setattr(physical, "pull_messages", pulled)
    assert failed(grid.send_and_receive(broadcast(range(30)))) == {}
    assert {message.metadata.dst_node_id for message in physical.sent} == set(physical.get_node_ids())


@settings(max_examples=60)
@given(
    clients=st.sets(st.integers(0, 79), min_size=1),
    nodes=st.integers(1, 9),
    together=st.integers(1, 9),
    size=st.sampled_from([1, 40, 100, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_who_trains_together_depends_on_who_was_asked_alone(
    clients: set[int], nodes: int, together: int, size: int, seed: int
) -> None:
    app, groups = app_that_notes_groups()
    physical = Slow(app, nodes, seed)
    grid = CohortGrid(physical, 80, SECRET, list(physical.get_node_ids()), group_size=together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", size)
        replies = list(grid.send_and_receive(broadcast(random.Random(seed).sample(sorted(clients), len(clients)))))
    inorder = sorted(clients)
    assert sorted(groups) == [inorder[start : start + together] for start in range(0, len(inorder), together)]
    assert [reply.content.metric_records["metrics"]["client"] for reply in replies] == inorder


@pytest.mark.parametrize("answer", [[], [None]])
def test_a_node_that_takes_no_message_is_left_out_and_its_work_goes_to_others(
    answer: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = slow(12, 3)
    first, second, third = physical.get_node_ids()
    physical.refusing = {first: answer, third: answer}
    replies = list(grid.send_and_receive(broadcast(range(12)), timeout=20))
    assert failed(replies) == {}
    assert [reply.metadata.src_node_id for reply in replies] == list(range(12))
    assert {message.metadata.dst_node_id for message in physical.sent} == {second}
    assert sorted(physical.refused) == [first, third], "who refused is not asked again in the same round"
    physical.refusing = {}
    physical.sent.clear()
    assert failed(grid.send_and_receive(broadcast(range(12)))) == {}
    assert len({message.metadata.dst_node_id for message in physical.sent}) == 3, "the next round asks everybody"


@pytest.mark.parametrize("answer", [[], [None]])
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_when_no_node_takes_messages_everybody_has_an_error_reply_at_once(
    answer: list[Any], timeout: float | None
) -> None:
    grid, physical = slow(5, 2)
    physical.refusing = dict.fromkeys(physical.get_node_ids(), answer)
    started = time.monotonic()
    assert failed(grid.send_and_receive(broadcast(range(5)), timeout=timeout)) == dict.fromkeys(
        range(5), "its node failed: no node takes messages any more"
    )
    assert time.monotonic() - started < 1


def test_a_node_that_refuses_halfway_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = slow(12, 2)
    replies = []
    for reply in grid.send_and_receive(broadcast(range(12)), timeout=20):
        replies.append(reply)
        if len(replies) == 4:
            physical.refusing = {min(physical.get_node_ids()): []}
    assert failed(replies) == {}
    assert len(replies) == 12


def test_the_deadline_holds_and_who_answered_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, physical = slow(6, 3)
    silent = sorted(physical.get_node_ids())[1]
    physical.longest[silent] = 0
    monkeypatch.setattr(physical, "rng", random.Random(1))
    pull = physical.pull_messages

    def pulled(names: Iterable[str]) -> Iterable[Message]:
        hidden = {name for name in names if physical._replies[name].metadata.src_node_id == silent}
        return pull([name for name in names if name not in hidden])

    monkeypatch.setattr(physical, "pull_messages", pulled)
    started = time.monotonic()
    replies = list(grid.send_and_receive(broadcast(range(6)), timeout=0.4))
    assert 0.3 < time.monotonic() - started < 1.2
    assert failed(replies) == {2: "no reply in time", 3: "no reply in time"}
    assert [reply.metadata.src_node_id for reply in replies] == list(range(6))


def test_who_is_not_begun_with_in_time_fails_and_who_is_done_counts() -> None:
    def train(message: Message, context: Context) -> Message:
        time.sleep(0.15)
        return Message(content(), reply_to=message)

    grid, _ = make(clients=8, nodes=1, train=train)
    late = failed(grid.send_and_receive(broadcast(range(8)), timeout=0.4))
    assert list(late) == list(range(8))[-len(late) :]
    assert 2 <= len(late) <= 6
    assert set(late.values()) == {"no reply in time"}


def test_a_node_that_is_late_is_left_alone_until_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, physical = make(clients=6, nodes=3)
    monkeypatch.setattr(physical, "pull_messages", lambda names: InProcessGrid.pull_messages(physical, names))
    nodes = sorted(physical.get_node_ids())
    physical.silent = {nodes[1]}
    assert len(failed(grid.send_and_receive(broadcast(range(6)), timeout=0.2))) == 2
    (late,) = grid._late
    for _ in range(2):
        before = len(physical.sent)
        assert not failed(grid.send_and_receive(broadcast(range(6)), timeout=5))
        assert nodes[1] not in [message.metadata.dst_node_id for message in physical.sent[before:]]
    physical.silent = set()
    physical._replies[late] = Message(RecordDict(), reply_to=physical.sent[1])  # at last
    assert not failed(grid.send_and_receive(broadcast(range(6)), timeout=5))
    before = len(physical.sent)
    assert not failed(grid.send_and_receive(broadcast(range(6)), timeout=5))
    assert nodes[1] in [message.metadata.dst_node_id for message in physical.sent[before:]]


def test_a_late_node_does_not_cost_one_that_failed_once() -> None:
    grid, physical = make(clients=6, nodes=2)
    late, other = sorted(physical.get_node_ids())
    physical.silent = {late}
    list(grid.send_and_receive(broadcast(range(6)), timeout=0.2))
    physical.dead = {other}
    replies = []
    for reply in grid.send_and_receive(broadcast(range(6)), timeout=5):
        physical.dead = set()
        replies.append(reply)
    assert set(failed(replies)) == {0, 1, 2}


class Threaded(InProcessGrid):
    """Nodes that begin `delay` seconds after a message was sent, and work beside the server."""

    def __init__(self, app: ClientApp, nodes: int, delay: float) -> None:
        super().__init__(app, nodes)
        self.delay = delay
        self.done: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        def work(message: Message, name: str) -> None:
            time.sleep(self.delay)
            self.done[name] = self._app(message, self._contexts[message.metadata.dst_node_id])

        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = f"message-{time.monotonic_ns()}"
            names.append(name)
            threading.Thread(target=work, args=(message, name), daemon=True).start()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.done.pop(name) for name in list(message_ids) if name in self.done]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("delay", "each", "timeout"),
    [
        (0.5, 0.1, 1.0),  # the message has waited for its node
        (0.0, 0.25, 0.6),  # who is begun with before the end would be done after it
        (0.9, 0.15, 1.0),  # what is done after the end is on its way
    ],
)
def test_time_is_counted_from_when_the_message_was_sent(delay: float, each: float, timeout: float) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(each)
        return Message(content(), reply_to=message)

    app.query(COHORT_MESSAGE_TYPE.split(".")[1])(lambda message, context: play_cohort(app, message, context))
    physical = Threaded(app, 1, delay)
    grid = CohortGrid(physical, 20, SECRET, list(physical.get_node_ids()))
    started = time.monotonic()
    late = failed(grid.send_and_receive(broadcast(range(20)), timeout=timeout))
    assert time.monotonic() - started < 1.25 * timeout + 0.1
    assert 1 <= 20 - len(late) <= (timeout - delay) / each + 1
    assert set(late.values()) == {"no reply in time"}


@pytest.mark.thorough
def test_a_silent_node_costs_the_clients_of_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have all the time until the deadline for the rest of the work."""
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = make(clients=40, nodes=3, train=lambda message, context: Message(content(), reply_to=message))
    physical.silent = {min(physical.get_node_ids())}
    replies = list(grid.send_and_receive(broadcast(range(40)), timeout=1.0))
    assert len(failed(replies)) == 1


def test_a_dead_node_does_not_take_the_work_of_those_who_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead node answers faster than any that trains."""
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = slow(40, 2)
    dead, alive = physical.get_node_ids()
    physical.dead = {dead}
    physical.longest = {dead: 0, alive: 8}
    assert len(failed(grid.send_and_receive(broadcast(range(40)), timeout=20))) <= 4


def test_whoever_stops_listening_leaves_the_rest_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_MESSAGE_BYTES", 1)
    grid, physical = slow(30, 2)
    replies = iter(grid.send_and_receive(broadcast(range(30))))
    next(replies)
    assert len(physical.sent) <= 4


@pytest.mark.parametrize("parked", [True, False])
def test_replies_are_parked_where_there_is_a_folder_for_them_and_still_say_the_same(
    parked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fedsim.federation.engines.cohort, "default_reply_memory", lambda num_bytes: 0)
    grid, _ = slow(10, 2, parking=tmp_path if parked else None)
    replies = list(grid.send_and_receive(broadcast(range(10))))
    arrays = [reply.content.array_records["arrays"]["w"] for reply in replies]
    assert [array.is_in_memory for array in arrays] == [not parked] * 10
    assert [array.numpy().tolist() for array in arrays] == [[client] * 3 for client in range(10)]


# One client's trouble is its own.


class Mortal(Counting):
    """A node that plays one of `deadly` dies over the whole message, whatever it had done before."""

    def __init__(self, app: ClientApp, nodes: int, deadly: set[int]) -> None:
        super().__init__(app, nodes)
        self.deadly = deadly

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        (name,) = super().push_messages([message])
        if self.deadly & {int(client) for client in message.content.config_records["cohort"]["clients"]}:
            self._replies[name] = Message(Error(code=2, reason="the actor died"), reply_to=message)
        return [name]


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("deadly", [{5}, {0, 19}, {4, 5, 6}, set(range(20))])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_who_kills_its_node_fails_alone(deadly: set[int], nodes: int, together: int) -> None:
    app, groups = app_that_notes_groups()
    physical = Mortal(app, nodes, deadly)
    grid = CohortGrid(physical, 20, SECRET, list(physical.get_node_ids()), group_size=together)
    replies = list(grid.send_and_receive(broadcast(range(20)), timeout=60))
    assert failed(replies) == dict.fromkeys(sorted(deadly), "its node failed 3 times (the actor died)")
    assert [reply.metadata.src_node_id for reply in replies] == list(range(20))
    others = [group for group in groups if not deadly & set(group)]
    assert all(len(group) in (1, together) for group in others), "no other groups than without the failure"


def hanging(client: int, others: float = 0.0) -> Any:
    def train(message: Message, context: Context) -> Message:
        time.sleep(60 if context.node_config["partition-id"] == client else others)
        return Message(content(), reply_to=message)

    return train


@pytest.mark.parametrize("client", [*(pytest.param(client, marks=pytest.mark.thorough) for client in (0, 3)), 7])
def test_who_hangs_is_interrupted_and_fails_alone(client: int) -> None:
    before = signal.getsignal(signal.SIGALRM)
    grid, _ = make(clients=8, nodes=1, train=hanging(client))
    started = time.monotonic()
    assert failed(grid.send_and_receive(broadcast(range(8)), timeout=0.4)) == {client: "no reply in time"}
    assert time.monotonic() - started < 2
    assert signal.getsignal(signal.SIGALRM) is before


def test_who_hangs_in_a_group_fails_alone() -> None:
    app = ClientApp()
    app.train()(hanging(2))

    @app.query(COHORT_MESSAGE_TYPE.split(".")[1])
    def cohort(message: Message, context: Context) -> Message:
        def ahead(message: Message, group: Sequence[int]) -> dict[int, Any]:
            time.sleep(60 if 2 in group else 0)
            return {client: {"metrics": MetricRecord({"client": client})} for client in group}

        return play_cohort(app, message, context, ahead)

    physical = Counting(app, 1)
    grid = CohortGrid(physical, 8, SECRET, list(physical.get_node_ids()), group_size=4)
    assert failed(grid.send_and_receive(broadcast(range(8)), timeout=0.8)) == {2: "no reply in time"}


def test_an_alarm_of_the_host_program_still_rings() -> None:
    rung: list[int] = []
    before, timer = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number)), (0.0, 0.0)
    try:
        timer = signal.setitimer(signal.ITIMER_REAL, 0.3)
        grid, _ = make(clients=2, nodes=1, train=hanging(0))
        assert list(failed(grid.send_and_receive(broadcast(range(2)), timeout=0.2))) == [0]
        time.sleep(0.4)
        assert rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


class Stop(BaseException):
    """No Exception."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SystemExit(0), "it called sys.exit(0)"), (Stop("enough"), "Stop: enough")],
    ids=["exit", "a BaseException"],
)
def test_who_exits_fails_alone(error: BaseException, reason: str) -> None:
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise error
        return Message(content(), reply_to=message)

    grid, _ = make(clients=3, nodes=1, train=train)
    assert failed(grid.send_and_receive(broadcast(range(3)))) == {1: reason}


def test_a_reason_reaches_no_terminal_as_an_order_and_is_capped() -> None:
    def train(message: Message, context: Context) -> Message:
        raise ValueError("\x1b[2J\x1b]0;owned\x07 gone\r\n" + "x" * 100_000)

    grid, _ = make(clients=1, nodes=1, train=train)
    (reason,) = failed(grid.send_and_receive(broadcast([0]))).values()
    assert reason is not None
    assert reason.startswith("ValueError: [2J ]0;owned gone xxx")
    assert reason.isprintable()
    assert len(reason) == 300


@pytest.mark.parametrize("owner", ["-1", "x", ""])
def test_an_answer_for_somebody_who_is_no_client_is_no_answer(owner: str) -> None:
    app = ClientApp()

    @app.query(COHORT_MESSAGE_TYPE.split(".")[1])
    def cohort(message: Message, context: Context) -> Message:
        return Message(RecordDict({f"{owner}/metrics": MetricRecord({"n": 1})}), reply_to=message)

    physical = InProcessGrid(app, 1)
    grid = CohortGrid(physical, 2, SECRET, list(physical.get_node_ids()))
    why = f"its node answered for '{owner}', which is not a client"
    told = f"its node failed 3 times ({why})"
    assert failed(grid.send_and_receive(broadcast([0, 1]))) == {0: told, 1: told}


def test_an_answer_that_comes_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, physical = make(clients=2, nodes=1)
    pull = physical.pull_messages
    monkeypatch.setattr(physical, "pull_messages", lambda names: [m for m in pull(names) for _ in range(2)])
    assert [r.metadata.src_node_id for r in grid.send_and_receive(broadcast([0, 1]))] == [0, 1]


# A lost host is no fault of a client.


class Lossy(Counting):
    """A grid whose first `losses` messages are lost with the nodes that got them, whoever they are for."""

    def __init__(self, app: ClientApp, nodes: int, losses: int) -> None:
        super().__init__(app, nodes)
        self.losses = losses
        self.offline: set[int] = set()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in getattr(self, "offline", ())]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        (name,) = super().push_messages([message])
        if self.losses:
            self.losses -= 1
            self._replies[name] = Message(Error(code=2, reason="the actor died"), reply_to=message)
        return [name]


def lossy(nodes: int, losses: int, together: int) -> tuple[CohortGrid, Lossy, list[list[int]]]:
    app, groups = app_that_notes_groups()
    physical = Lossy(app, nodes, losses)
    return CohortGrid(physical, 20, SECRET, list(physical.get_node_ids()), group_size=together), physical, groups


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("losses", [1, 2])
def test_clients_of_a_lost_host_are_asked_again_and_train_with_the_same_others(nodes: int, losses: int) -> None:
    grid, _, groups = lossy(nodes, losses, together=4)
    assert failed(grid.send_and_receive(broadcast(range(20)), timeout=60)) == {}
    whole = [list(range(start, start + 4)) for start in range(0, 20, 4)]
    assert {tuple(group) for group in groups} == set(map(tuple, whole))


def test_a_client_that_is_asked_alone_survives_two_lost_nodes() -> None:
    grid, _, _ = lossy(2, 2, together=1)
    assert failed(grid.send_and_receive(broadcast([3]), timeout=60)) == {}
    grid, _, _ = lossy(2, 3, together=1)
    assert failed(grid.send_and_receive(broadcast([3]), timeout=60)) == {3: "its node failed 3 times (the actor died)"}


def test_a_node_that_failed_or_is_gone_is_not_asked_in_the_next_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, physical, _ = lossy(3, 1, together=1)
    assert failed(grid.send_and_receive(broadcast(range(20)), timeout=60)) == {}
    lost = physical.sent[0].metadata.dst_node_id
    for _ in range(2):
        physical.sent.clear()
        assert failed(grid.send_and_receive(broadcast(range(20)), timeout=60)) == {}
        assert lost not in {message.metadata.dst_node_id for message in physical.sent}
    monkeypatch.setattr(fedsim.federation.engines.cohort, "_QUARANTINE", 0.0)
    gone = next(node for node in physical.get_node_ids() if node != lost)
    physical.offline = {gone}
    physical.sent.clear()
    assert failed(grid.send_and_receive(broadcast(range(20)), timeout=60)) == {}
    asked = {message.metadata.dst_node_id for message in physical.sent}
    assert (lost in asked, gone in asked) == (True, False)
