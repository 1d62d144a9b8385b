"""Many logical clients over few nodes: a strategy cannot tell the difference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.engines.cohort import COHORT, CohortGrid, play_cohort
from fedsim.engines.ray import node_count
from fedsim.engines.serial import InProcessGrid

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
    app.query(COHORT.split(".")[1])(lambda message, context: play_cohort(app, message, context))
    physical = Counting(app, nodes)
    return CohortGrid(physical, clients, SECRET, list(physical.get_node_ids())), physical


def content(value: float = 0.0) -> RecordDict:
    return RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.full(3, value, np.float32))}), "config": ConfigRecord({"lr": 0.1})}
    )


def broadcast(clients: Iterable[int], payload: RecordDict | None = None) -> list[Message]:
    shared = payload or content()
    return [Message(shared, client, "train") for client in clients]


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
def test_every_client_answers_for_herself_in_the_order_of_ids(nodes: int) -> None:
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


def test_the_clients_of_a_dead_or_silent_node_have_error_replies() -> None:
    grid, physical = make(clients=6, nodes=3)
    dead, silent, alive = list(physical.get_node_ids())
    physical.dead, physical.silent = {dead}, {silent}
    replies = list(grid.send_and_receive(broadcast(range(6)), timeout=0.2))
    reasons = {r.metadata.src_node_id: r.error.reason for r in replies if r.has_error()}
    assert reasons == {0: "actor died", 1: "actor died", 2: "no reply in time", 3: "no reply in time"}
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
