"""Many logical clients over few physical nodes.

Flower carries one message a client: each holds its own copy of the global model, and each costs
about as much as training a small network. Here one physical message carries the broadcast once and
names the logical clients that its node shall play; the strategy still sees one message a client.
Logical node ids are partition ids, so sampling and recordings do not depend on Flower's random ids,
and replies are handed over in the order of those ids, so sums do not depend on who was faster.

Replies stream: a node gets the next message when it has answered the last, and of a large round
only what the messages under way hold, and `Parking` allows, lies in memory.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsim.engines.arrays import Parking, hold
from fedsim.engines.readiness import in_a_line
from fedsim.errors import FedsimError

COHORT = "query.cohort"
_ORDER = "cohort"
_FAILED = 2
_FEW = 8
_MESSAGE_BYTES = 64 << 20
_MEMORY_BYTES = 512 << 20
_MUCH = 128 << 20
_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.25
_GRACE = 5.0
_TOO_LATE = "no reply in time"

Answers = dict[int, dict[str, Any]]
Replies = Mapping[int, Mapping[str, Any]]


class CohortGrid(Grid):
    """A Grid of `clients` logical nodes, numbered from 0, over the nodes of a physical Grid.

    Args:
        physical: carries the messages.
        clients: number of logical clients.
        simulation: sent along for the ClientApp alone (which data to load, which defenses to use);
            the strategy, and so the curious server, never sees it.
        nodes: ids of the physical nodes; any of them can play any client.
        together: clients that train as one batch of computations. Who is in one depends on the
            messages of the round alone, so that nodes and engines change no bit.
        parking: folder for the replies of large rounds; None is the system's for temporary files.
        steps: how many messages a round is cut into at least, of eight clients or more each: replies come with the
            message that they were in, and somebody may be waiting for a sign.
    """

    def __init__(
        self,
        physical: Grid,
        clients: int,
        simulation: ConfigRecord,
        nodes: Sequence[int],
        *,
        together: int = 1,
        parking: Path | None = None,
        steps: int = 0,
    ) -> None:
        self._physical = physical
        self._clients = clients
        self._simulation = simulation
        self._nodes = nodes
        self._together = together
        self._parking = parking
        self._steps = steps
        self._replies: dict[str, Message] = {}
        self._sent = 0
        self._late: dict[str, int] = {}

    def set_run(self, run: Run) -> None:
        """See Grid."""
        self._physical.set_run(run)

    @property
    def run(self) -> Run:
        """See Grid."""
        return self._physical.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid; Flower calls it deprecated."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The partition ids, ascending."""
        return range(self._clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Exchange `messages` at once; replies are kept for `pull_messages`."""
        ids = []
        for reply in self.send_and_receive(messages):
            self._sent += 1
            ids.append(f"{reply.metadata.src_node_id}-{self._sent}")
            self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """One reply a message, ascending by client, as they come; who did not answer has an error reply.

        When the next one is asked for, the arrays of a reply may move to disk, from where they are
        read again as often as somebody wants them.
        """
        messages = list(messages)
        if messages and len(messages) * _size(messages[0].content) > _MUCH:
            gc.collect()  # Flower's records refer to themselves, so those of the last round are still about
        parking = Parking(self._parking, _MEMORY_BYTES)
        for message, reply in self._exchange(messages, timeout, parking):
            yield _reply(reply, message)
            _park(reply, parking)

    def _exchange(
        self, messages: Sequence[Message], timeout: float | None, parking: Parking
    ) -> Iterator[tuple[Message, dict[str, Any]]]:
        orders = self._orders(sorted(messages, key=lambda m: m.metadata.dst_node_id))
        work = _Work(self._physical, self._nodes, self._late, parking, timeout)
        try:
            for place, order in enumerate(orders):
                while place not in work.answered:
                    while work.wants_more and work.sent < len(orders):
                        work.send(lambda node, seconds: self._pack(orders[work.sent], node, seconds))
                    if not work.receive(place):
                        work.wait_or_give_up(place)
                got = work.answered.pop(place)
                nothing = {"error": {"reason": got if isinstance(got, str) else "no reply"}}
                for message in order:
                    yield message, nothing if isinstance(got, str) else got.pop(message.metadata.dst_node_id, nothing)
        finally:
            self._late = {name: node for name, (_, node) in work.under_way.items()}

    def _orders(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Runs of messages with one content, short enough to keep all nodes busy and messages small."""
        orders: list[list[Message]] = []
        for _, group in groupby(messages, key=lambda m: (id(m.content), m.metadata.message_type)):
            alike = list(group)
            fewest = max(len(self._nodes), -(-len(alike) * _size(alike[0].content) // _MESSAGE_BYTES))
            fewest = max(fewest, min(self._steps, len(alike) // _FEW))
            length = -(-len(alike) // fewest)
            length += -length % self._together
            orders += [alike[start : start + length] for start in range(0, len(alike), length)]
        return orders

    def _pack(self, order: Sequence[Message], node: int, seconds: float) -> Message:
        job = ConfigRecord(
            {
                "clients": [message.metadata.dst_node_id for message in order],
                "together": self._together,
                "num-partitions": self._clients,
                "message-type": order[0].metadata.message_type,
                "seconds": seconds,
            }
        )
        content = RecordDict({**order[0].content, "simulation": self._simulation, _ORDER: job})
        return Message(content, dst_node_id=node, message_type=COHORT)


class _Work:
    """Orders on their way to the nodes and back.

    Attributes:
        under_way: message id to the place of its order, and its node. The place is None for what was
            given up in an earlier exchange: its node is busy until it has answered.
        answered: place of an order to what came back, or why nothing did.
        sent: how many orders were sent.
    """

    def __init__(
        self, grid: Grid, nodes: Sequence[int], late: Mapping[str, int], parking: Parking, timeout: float | None
    ) -> None:
        self._grid = grid
        self._parking = parking
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        # Nodes stop beginning with clients at the deadline; what they have by then may still come.
        self._end = math.inf if timeout is None else self._deadline + min(_GRACE, timeout / 4)
        self._wait = _SHORTEST_WAIT
        self._idle = deque(node for node in nodes if node not in late.values())
        self.under_way: dict[str, tuple[int | None, int]] = {name: (None, node) for name, node in late.items()}
        self.answered: dict[int, Answers | str] = {}
        self.sent = 0

    @property
    def wants_more(self) -> bool:
        return bool(self._idle) and time.monotonic() < self._deadline

    def send(self, pack: Callable[[int, float], Message]) -> None:
        """Give the next order to a node that has nothing to do; a node that does not take it is left out."""
        node = self._idle.popleft()
        message = pack(node, self._deadline - time.monotonic())
        names = [name for name in self._grid.push_messages([message]) if name]
        if names:
            self.under_way[names[0]] = (self.sent, node)
            self.sent += 1

    def receive(self, place: int) -> bool:
        """Take the answers that are there; whether there were any. The next to be handed over is that of `place`."""
        answers = list(self._grid.pull_messages(list(self.under_way))) if self.under_way else []
        for answer in answers:
            which, node = self.under_way.pop(answer.metadata.reply_to_message_id)
            # One that fails is quick about it, and would get all there is to do.
            others = self._idle or any(at is not None for at, _ in self.under_way.values())
            if not answer.has_error() or not others:
                self._idle.append(node)
            if which is None:
                continue
            self.answered[which] = unpacked = _unpack(answer)
            if which != place and not isinstance(unpacked, str):
                for reply in unpacked.values():  # they may have to wait long for those before them
                    _park(reply, self._parking)
        return bool(answers)

    def wait_or_give_up(self, place: int) -> None:
        """Pause, unless there is nothing to wait for."""
        if time.monotonic() > self._end:
            self.answered[place] = _TOO_LATE
        elif not self.under_way and not self.wants_more:
            self.answered[place] = _TOO_LATE if time.monotonic() > self._deadline else "no node takes messages any more"
        else:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, _LONGEST_WAIT)


def play_cohort(
    app: ClientApp, message: Message, context: Context, ahead: Callable[[Message, Sequence[int]], Replies] | None = None
) -> Message:
    """Let `app` answer for every logical client that a cohort message names.

    A client that raises, or answers with an error, becomes an error reply of that client alone. Once
    the message's time is up, no other client is begun with.

    Args:
        ahead: called with the message to one client and all who can work together with her; those
            for whom it returns the records of a reply are not asked one by one.
    """
    order: dict[str, Any] = dict(message.content[_ORDER])
    shared = {key: record for key, record in message.content.items() if key != _ORDER}
    clients, together = order["clients"], order["together"]
    began = time.monotonic()
    on_its_way = max(0.0, time.time() - message.metadata.created_at)  # or waiting for this node to be free
    over = False
    answers = RecordDict()
    for count, start in enumerate(range(0, len(clients), together)):
        group = clients[start : start + together]
        gone = time.monotonic() - began
        usual = gone / count if count else 0.0  # a client who would not be done in time would cost the others' answers
        over = over or on_its_way + gone + usual > order["seconds"]
        if over:
            answers.update({f"{client}/error": ConfigRecord({"reason": _TOO_LATE}) for client in group})
            continue
        done = ahead(_logical(message, shared, group[0], order["message-type"]), group) if ahead else {}
        for client in group:
            if client in done:
                reply = done[client]
            else:
                own = Context(
                    run_id=context.run_id,
                    node_id=client,
                    node_config={"partition-id": client, "num-partitions": order["num-partitions"]},
                    state=RecordDict(),
                    run_config=context.run_config,
                )
                reply = _answer(app, _logical(message, shared, client, order["message-type"]), own)
            for name, record in reply.items():
                answers[f"{client}/{name}"] = record
    return Message(answers, reply_to=message)


def _answer(app: ClientApp, message: Message, context: Context) -> Mapping[str, Any]:
    try:
        reply = app(message, context)
    except Exception as error:
        reason = str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"
        return {"error": ConfigRecord({"reason": reason})}
    if reply.has_error():
        return {"error": ConfigRecord({"reason": reply.error.reason or "no reason given"})}
    return reply.content


def _logical(physical: Message, records: Mapping[str, Any], client: int, message_type: str) -> Message:
    """The message to one client, as an engine would have delivered it."""
    address = _addressed(physical.metadata, client, message_type)
    return Message(content=RecordDict(dict(records)), metadata=address)  # type: ignore[call-overload, no-any-return]


def _addressed(physical: Metadata, client: int, message_type: str) -> Metadata:
    return Metadata(
        run_id=physical.run_id,
        message_id="",
        src_node_id=physical.src_node_id,
        dst_node_id=client,
        reply_to_message_id="",
        group_id=physical.group_id,
        created_at=physical.created_at,
        ttl=physical.ttl,
        message_type=message_type,
        src_task_id=physical.src_task_id,
        dst_task_id=physical.dst_task_id,
    )


def _unpack(answer: Message) -> Answers | str:
    """What each client sent back, or why none did."""
    if answer.has_error():
        return in_a_line(answer.error.reason or "its node failed")
    answers: Answers = {}
    for key, record in answer.content.items():
        owner, name = key.split("/", 1)
        answers.setdefault(int(owner), {})[name] = record
        if isinstance(record, ArrayRecord):
            hold(record)
    return answers


def _park(reply: Mapping[str, Any], parking: Parking) -> None:
    for record in reply.values():
        if isinstance(record, ArrayRecord):
            parking.take(record)


def _reply(answer: dict[str, Any], message: Message) -> Message:
    """The ordinary Flower reply to one logical message."""
    if "error" in answer:
        return Message(Error(code=_FAILED, reason=str(answer["error"]["reason"])), reply_to=message)
    return Message(RecordDict(answer), reply_to=message)


def _size(content: RecordDict) -> int:
    return sum(
        math.prod(a.shape) * np.dtype(a.dtype).itemsize for r in content.array_records.values() for a in r.values()
    )
