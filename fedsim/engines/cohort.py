"""Many logical clients over few physical nodes: the side of the server.

Flower carries one message for each client. Each such message holds its own copy of the global model, and handling it
costs about as much as training a small network. Here one physical message carries the broadcast once and names the
logical clients that its node shall play (`fedsim.engines.node`). The strategy still sees one message for each client.
Logical node ids are partition ids, so sampling and recordings do not depend on Flower's random ids. Replies are handed
over in the order of those ids, so sums do not depend on which client was faster.

Replies stream: a node gets its next message after it has answered the last one. So of a large round, memory holds only
the messages under way and as many replies as `Parking` allows, or where replies may not lie on disk, those that came
before their turn.

The failure of one client stays its own, and that of a node is none of a client. When a node fails over a message, its
clients are asked again elsewhere, after a pause: those that train together whole, so that no bit changes, and one by
one only where that failed as well, because one of them may be what the node dies of.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsim.engines.arrays import Parking, hold
from fedsim.engines.memory import ClientMemory
from fedsim.engines.readiness import in_a_line
from fedsim.errors import one_line, what_it_said
from fedsim.machine import free_memory
from fedsim.recording.header import LOST

log = logging.getLogger(__name__)

COHORT = "query.cohort"
"""Type of a message that names the clients to play."""
ORDER = "cohort"
"""Name of the record in it that names them."""
TOO_LATE = "no reply in time"


def reply_room() -> int:
    """Bytes that replies may take in memory, where nobody says: a quarter of what is free, and 512 MB at least."""
    return max(512 << 20, free_memory() // 4)


def silence(number: int) -> str:
    """All that the server gets to know of a client that sends nothing in round `number`, for whatever reason."""
    return f"straggler: did not return in round {number}"


_FAILED = 2
_FEW = 8
_MESSAGE_BYTES = 64 << 20
_MUCH = 128 << 20
_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.25
_GRACE = 5.0
_PAUSES = (1.0, 5.0)
"""Seconds before clients are asked again, the first time and the second: a host needs some to restart an actor."""
_QUARANTINE = 60.0
"""Seconds for which a node that failed gets no message while others do."""

Answers = dict[int, dict[str, Any]]


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
        parking: folder for the replies of large rounds; None where they may not lie on disk and wait in memory.
        steps: the least number of messages that a round is cut into, as long as each has eight clients or more. The
            replies of one message arrive together, so more messages show progress more often.
        room: bytes that replies may take in memory; by default a quarter of what is free, and 512 MB at least.
        memory: what clients keep from round to round, likewise never seen by the strategy. What comes with a reply
            counts once the caller calls `memory.accept`.
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
        room: int | None = None,
        memory: ClientMemory | None = None,
    ) -> None:
        self._physical = physical
        self._clients = clients
        self._simulation = simulation
        self._nodes = nodes
        self._together = together
        self._parking = parking
        self._steps = steps
        self._room = room
        self.memory = memory or ClientMemory()
        self._replies: dict[str, Message] = {}
        self._sent = 0
        self._late: dict[str, int] = {}
        self._failed: dict[int, float] = {}  # by node, when it failed last

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
        """One reply for each message, ascending by client; a client that did not answer has an error reply.

        Once the caller asks for the next reply, the arrays of the last one may move to disk, if there is a folder for
        that. They are read again from there whenever they are needed.
        """
        messages = list(messages)
        if messages and self._bytes(messages) > _MUCH:
            gc.collect()  # Flower's records refer to themselves, so those of the last round are still in memory
        room = reply_room() if self._room is None else self._room
        parking = None if self._parking is None else Parking(self._parking, room)
        for message, reply in self._exchange(messages, timeout, parking):
            self.memory.bring(_client(message), reply)
            yield _reply(reply, message)
            _park(reply, parking)

    def _exchange(
        self, messages: Sequence[Message], timeout: float | None, parking: Parking | None
    ) -> Iterator[tuple[Message, dict[str, Any]]]:
        orders = self._orders(sorted(messages, key=lambda m: m.metadata.dst_node_id))
        work = _Work(self._physical, self._usable(), self._late, self._failed, parking, timeout, orders, self._together)
        try:
            for place, order in enumerate(orders):
                while not work.is_done(place):
                    while work.wants_more:
                        work.send(self._pack)
                    if not work.receive(place):
                        work.wait_or_give_up(place)
                got = work.take(place)
                for message in order:
                    yield message, got.pop(message.metadata.dst_node_id, error_reply("no reply"))
        finally:
            self._late = {name: node for name, (_, node) in work.under_way.items()}

    def _usable(self) -> Sequence[int]:
        """The nodes that get messages: those that are connected and did not fail lately; all where there are none."""
        connected, before = set(self._physical.get_node_ids()), time.monotonic() - _QUARANTINE
        usable = [node for node in self._nodes if node in connected and self._failed.get(node, -math.inf) < before]
        return usable or self._nodes

    def _orders(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Runs of messages with one content, short enough to keep all nodes busy and messages small."""
        orders: list[list[Message]] = []
        for _, group in groupby(messages, key=lambda m: (id(m.content), m.metadata.message_type)):
            alike = list(group)
            fewest = max(len(self._nodes), -(-self._bytes(alike) // _MESSAGE_BYTES))
            fewest = max(fewest, min(self._steps, len(alike) // _FEW))
            length = -(-len(alike) // fewest)
            length += -length % self._together
            orders += [alike[start : start + length] for start in range(0, len(alike), length)]
        return orders

    def _bytes(self, alike: Sequence[Message]) -> int:
        """An estimate of the bytes of all replies; each is about as large as the content of the first message."""
        return len(alike) * _size(alike[0].content) + self.memory.size(map(_client, alike))

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
        trains = order[0].metadata.message_type.split(".")[0] == MessageType.TRAIN
        memory = self.memory.packed(map(_client, order)) if trains else {}
        content = RecordDict({**order[0].content, "simulation": self._simulation, ORDER: job, **memory})
        return Message(content, dst_node_id=node, message_type=COHORT)


@dataclass(frozen=True, eq=False)
class _Order:
    """Messages that travel as one.

    Attributes:
        place: of the order in the round that they are of.
        messages: to one client each.
        failures: how many nodes have failed over them.
        not_before: on the monotonic clock, when they may be sent.
    """

    place: int
    messages: Sequence[Message]
    failures: int = 0
    not_before: float = 0.0

    def orders_to_retry(self, together: int) -> list[_Order]:
        """What to send now that a node has failed over it; nothing where it was sent often enough."""
        count, size, failures = len(self.messages), len(self.messages), self.failures + 1
        if count > together:
            size, failures = together, 0
        elif failures >= len(_PAUSES) and count > 1:
            size, failures = 1, 0
        elif failures > len(_PAUSES):
            return []
        after = time.monotonic() + _PAUSES[max(0, failures - 1)]
        return [
            _Order(self.place, self.messages[start : start + size], failures, after) for start in range(0, count, size)
        ]


class _Work:
    """Orders on their way to the nodes and back.

    An order over which a node failed is cut into the groups that train together, which are sent again; a group over
    which two nodes failed into single clients, of which each is sent three times at most.

    Attributes:
        under_way: message id to the order, its place and its node. A message that was given up in an earlier exchange
            has no order here, but its node is busy until it has answered.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Sequence[int],
        late: Mapping[str, int],
        failed: dict[int, float],
        parking: Parking | None,
        timeout: float | None,
        orders: Sequence[Sequence[Message]],
        together: int,
    ) -> None:
        self._grid = grid
        self._parking = parking
        self._together = together
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        # At the deadline nodes begin with no further client; what they have by then may still arrive.
        self._end = math.inf if timeout is None else self._deadline + min(_GRACE, timeout / 4)
        self._wait = _SHORTEST_WAIT
        self._idle = deque(node for node in nodes if node not in late.values())
        self._failed = failed
        self._to_send = deque(_Order(place, order) for place, order in enumerate(orders))
        self._missing = {place: {_client(message) for message in order} for place, order in enumerate(orders)}
        self._answered: dict[int, Answers] = {place: {} for place in self._missing}
        self.under_way: dict[str, tuple[_Order | None, int]] = {name: (None, node) for name, node in late.items()}

    @property
    def wants_more(self) -> bool:
        return bool(self._idle) and time.monotonic() < self._deadline and self._next is not None

    @property
    def _next(self) -> _Order | None:
        """The first order that need not wait any longer."""
        now = time.monotonic()
        return next((order for order in self._to_send if order.not_before <= now), None)

    def is_done(self, place: int) -> bool:
        return not self._missing[place]

    def take(self, place: int) -> Answers:
        """What each client of the order at `place` answered."""
        return self._answered.pop(place)

    def send(self, pack: Callable[[Sequence[Message], int, float], Message]) -> None:
        """Give the next order to a node that has nothing to do; a node that does not take it is left out."""
        if (order := self._next) is None:
            return
        node = self._idle.popleft()
        message = pack(order.messages, node, self._deadline - time.monotonic())
        if names := [name for name in self._grid.push_messages([message]) if name]:
            self._to_send.remove(order)
            self.under_way[names[0]] = (order, node)

    def receive(self, place: int) -> bool:
        """Take the answers that have arrived; whether there were any. The order at `place` is handed over next."""
        answers = list(self._grid.pull_messages(list(self.under_way))) if self.under_way else []
        for answer in answers:
            if (known := self.under_way.pop(answer.metadata.reply_to_message_id, None)) is None:
                continue  # it came twice
            order, node = known
            # A node that fails does so quickly, and would get all the remaining work.
            others = self._idle or any(other is not None for other, _ in self.under_way.values())
            if answer.has_error():
                self._failed[node] = time.monotonic()
            else:
                self._failed.pop(node, None)
            if not answer.has_error() or not others:
                self._idle.append(node)
            if order is None or self.is_done(order.place):
                continue
            if isinstance(got := _unpack(answer), str) and (retries := order.orders_to_retry(self._together)):
                count = len(order.messages)
                log.warning(
                    "a node failed (%s); its %s asked again", got, "client is" if count == 1 else f"{count} clients are"
                )
                self._to_send.extendleft(reversed(retries))
            else:
                self._note(order, got, place)
        return bool(answers)

    def _note(self, order: _Order, got: Answers | str, next_place: int) -> None:
        for client in map(_client, order.messages):
            if isinstance(got, str):
                reply = error_reply(f"{LOST} {order.failures + 1} times ({got})")
            else:
                reply = got.get(client, error_reply("no reply"))
            self._answered[order.place][client] = reply
            if order.place != next_place:  # it may have to wait long for those before it
                _park(reply, self._parking)
        self._missing[order.place] -= set(map(_client, order.messages))

    def wait_or_give_up(self, place: int) -> None:
        """Pause, unless there is nothing to wait for."""
        late = time.monotonic() > self._deadline
        if time.monotonic() > self._end:
            self._give_up(place, TOO_LATE)
        elif not self.under_way and (late or not (self._to_send and self._idle)):
            self._give_up(place, TOO_LATE if late else f"{LOST}: no node takes messages any more")
        else:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _give_up(self, place: int, why: str) -> None:
        self._answered[place] |= {client: error_reply(why) for client in self._missing[place]}
        self._missing[place] = set()


def error_reply(reason: str) -> dict[str, Any]:
    """The records of a client that failed."""
    return {"error": ConfigRecord({"reason": reason})}


def _client(message: Message) -> int:
    return message.metadata.dst_node_id


def _unpack(answer: Message) -> Answers | str:
    """What each client sent back, or why none did."""
    if answer.has_error():
        return in_a_line(answer.error.reason or "its node failed")
    answers: Answers = {}
    for key, record in answer.content.items():
        owner, _, name = key.partition("/")
        if not owner.isdecimal():
            return f"its node answered for '{owner}', which is no client"
        answers.setdefault(int(owner), {})[name] = record
        if isinstance(record, ArrayRecord):
            try:
                hold(record)
            except Exception as error:  # NumPy may raise almost anything at bytes that are no array
                answers[int(owner)] |= error_reply(f"its arrays cannot be read: {what_it_said(error)}")
    return answers


def _park(reply: Mapping[str, Any], parking: Parking | None) -> None:
    for record in reply.values():
        if parking is not None and isinstance(record, ArrayRecord):
            parking.take(record)


def _reply(answer: dict[str, Any], message: Message) -> Message:
    """The ordinary Flower reply to one logical message."""
    if "error" in answer:
        return Message(Error(code=_FAILED, reason=one_line(str(answer["error"]["reason"]))), reply_to=message)
    return Message(RecordDict(answer), reply_to=message)


def _size(content: RecordDict) -> int:
    return sum(
        math.prod(a.shape) * np.dtype(a.dtype).itemsize for r in content.array_records.values() for a in r.values()
    )
