"""The server's side of the cohort: many logical clients over few physical nodes.

Flower carries one message for each client. Each such message holds its own copy of the global
model, and handling it costs about as much as training a small network. Here one physical message
carries the broadcast once and names the logical clients that its node plays
(`fedsim.federation.engines.node`). The strategy still sees one message for each client. Logical node ids are
partition ids, so sampling and recordings do not depend on Flower's random ids. Replies are returned
in the order of those ids, so sums do not depend on which client was faster.

Replies stream: a node gets its next message after it has answered the last one. In a large round,
memory therefore holds only the messages in transit and as many replies as `ReplySpool` allows, or,
where replies may not be written to disk, those that came before their turn.

The failure of one client affects no other, and the failure of a node is not that of a client. When
a node fails over a message, its clients are asked again on other nodes, after a pause: first in the
groups that train together, so that no bit changes, and one by one only where that fails as well,
because one of them may be what kills the node.
"""

from __future__ import annotations

import gc
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsim.base.errors import error_reason, one_line
from fedsim.base.machine import free_memory
from fedsim.base.randomness import lend_generators
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import ReplyRecords, ReplySpool, array_bytes, make_lazy
from fedsim.federation.engines.client_state import ClientStateStore
from fedsim.federation.engines.readiness import summarise_failure
from fedsim.recording.header import NODE_FAILED

log = logging.getLogger(__name__)

COHORT_MESSAGE_TYPE = "query.cohort"
"""Type of a message that names the clients to play."""
ORDER_RECORD = "cohort"
"""Name of the record in it that names them."""
TOO_LATE = "no reply in time"
DEVICE_FAILED = "its device failed"
"""Beginning of the reason of a client whose device was lost, or its memory did not last."""


_LEAST_REPLY_MEMORY = 512 << 20
"""Bytes of replies that may stay in memory in any case."""


def default_reply_memory(num_bytes: int) -> int:
    """Return the default memory for about `num_bytes` of replies: a quarter of what is free, at least 512 MB."""
    if num_bytes < _LEAST_REPLY_MEMORY // 2:  # to ask what is free takes two milliseconds
        return _LEAST_REPLY_MEMORY
    return max(_LEAST_REPLY_MEMORY, free_memory() // 4)


_CLIENT_FAILED = 2
"""Code of the error reply of a logical client."""
_MIN_CLIENTS = 8
"""Fewest clients in a message that is cut to show progress more often."""
_MESSAGE_BYTES = 64 << 20
"""About the largest size of a message's replies."""
_COLLECT_FROM_BYTES = 128 << 20
"""Size of a round's replies from which garbage is collected before it."""
_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.25
_GRACE = 5.0
"""Seconds after the deadline in which replies under way may still arrive."""
_PAUSES = (1.0, 5.0)
"""Seconds before clients are asked again, once and twice: a host needs some to restart an actor."""
_QUARANTINE = 60.0
"""Seconds for which a node that failed gets no message while others do."""

Answers = dict[int, dict[str, Any]]
"""The records of each client's reply, by client."""


class CohortGrid(Grid):
    """Grid of logical clients, numbered from 0, over the nodes of a physical Grid.

    Args:
        physical: carries the messages.
        simulation: sent along for the ClientApp only (which data to load, which defenses to use);
            the strategy, and so the curious server, never sees it.
        nodes: ids of the physical nodes; any of them can play any client.
        group_size: clients that train as one batch of computations. The messages of the round alone
            decide which clients form a group, so that nodes and engines change no bit.
        spool_folder: folder for the replies of large rounds; None where they must not be written to
            disk and stay in memory.
        min_messages: the least number of messages that a round is cut into, as long as each has
            eight clients or more. The replies of one message arrive together, so more messages show
            progress more often.
        reply_memory: bytes of replies that may stay in memory; by default a quarter of what is
            free, and at least 512 MB.
        client_state: states that clients keep from round to round, likewise never seen by the
            strategy. The state that comes with a reply counts once the caller calls
            `client_state.commit`.
        evaluates_with_state: whether clients are given their state in evaluations, too.
    """

    def __init__(
        self,
        physical: Grid,
        clients: int,
        simulation: ConfigRecord,
        nodes: Sequence[int],
        *,
        group_size: int = 1,
        spool_folder: Path | None = None,
        min_messages: int = 0,
        reply_memory: int | None = None,
        client_state: ClientStateStore | None = None,
        evaluates_with_state: bool = False,
    ) -> None:
        self._physical = physical
        self._clients = clients
        self._simulation = simulation
        self._nodes = nodes
        self._group_size = group_size
        self._spool_folder = spool_folder
        self._min_messages = min_messages
        self._reply_memory = reply_memory
        self.client_state = client_state or ClientStateStore()
        self._evaluates_with_state = evaluates_with_state
        self._replies: dict[str, Message] = {}
        self._sent = 0
        self._late: dict[str, int] = {}
        self._failed: dict[int, float] = {}  # by node, when it failed last

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._physical.set_run(run)

    @property
    def run(self) -> Run:
        """Run that messages belong to."""
        return self._physical.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message; Flower calls this method deprecated."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the partition ids, ascending."""
        return range(self._clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Exchange `messages` at once, and store the replies for `pull_messages`."""
        ids = []
        for reply in self.send_and_receive(messages):
            self._sent += 1
            ids.append(f"{reply.metadata.src_node_id}-{self._sent}")
            self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies with these message ids, and forget them."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield one reply for each message, ascending by client; without an answer it is an error.

        Once the caller asks for the next reply, the arrays of the last one may move to disk, if
        there is a folder for that. They are read again from there whenever they are needed.
        """
        messages = list(messages)
        num_bytes = self._reply_bytes(messages) if messages else 0
        if num_bytes > _COLLECT_FROM_BYTES:
            gc.collect()  # Flower's records are cyclic, so those of the last round are still in memory
        limit = default_reply_memory(num_bytes) if self._reply_memory is None else self._reply_memory
        spool = None if self._spool_folder is None else ReplySpool(self._spool_folder, limit)
        for message, answer in self._exchange(messages, timeout, spool):
            self.client_state.extract(_client(message), answer)
            yield _make_reply(answer, message)
            _store(answer, spool)

    def _exchange(
        self, messages: Sequence[Message], timeout: float | None, spool: ReplySpool | None
    ) -> Iterator[tuple[Message, dict[str, Any]]]:
        """Yield each message with its answer, in the order of clients."""
        batches = self._split(sorted(messages, key=_client))
        dispatcher = _Dispatcher(
            self._physical, self._usable_nodes(), self._late, self._failed, spool, timeout, batches, self._group_size
        )
        try:
            for index, batch in enumerate(batches):
                while not dispatcher.is_complete(index):
                    with lend_generators():  # a round is in a seeded block, and threads may play clients
                        while dispatcher.can_send:
                            dispatcher.send_next(self._pack)
                        if not dispatcher.receive(index):
                            dispatcher.wait_or_give_up(index)
                answers = dispatcher.pop_answers(index)
                for message in batch:
                    client = _client(message)
                    yield message, answers.pop(client) if client in answers else error_reply("no reply")
        finally:
            self._late = {message_id: node for message_id, (_, node) in dispatcher.under_way.items()}

    def _usable_nodes(self) -> Sequence[int]:
        """Return the nodes that are connected and did not fail lately; all if there are none."""
        connected, lately = set(self._physical.get_node_ids()), time.monotonic() - _QUARANTINE
        usable = [node for node in self._nodes if node in connected and self._failed.get(node, -math.inf) < lately]
        return usable or self._nodes

    def _split(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Split into batches of one content, short enough to keep all nodes busy."""
        batches: list[list[Message]] = []
        for _, group in groupby(messages, key=lambda m: (id(m.content), m.metadata.message_type)):
            same_content = list(group)
            # Make one batch a node, or more for small messages or frequent progress.
            count = max(len(self._nodes), -(-self._reply_bytes(same_content) // _MESSAGE_BYTES))
            count = max(count, min(self._min_messages, len(same_content) // _MIN_CLIENTS))
            # Round the length up to whole groups that train together.
            length = -(-len(same_content) // count)
            length += -length % self._group_size
            for start in range(0, len(same_content), length):
                batches.append(same_content[start : start + length])
        return batches

    def _reply_bytes(self, messages: Sequence[Message]) -> int:
        """Estimate the bytes of all replies, each about as large as the first message."""
        return len(messages) * array_bytes(messages[0].content) + self.client_state.count_bytes(map(_client, messages))

    def _pack(self, messages: Sequence[Message], node: int, seconds: float) -> Message:
        """Pack messages of one content into a message to a node, with its time limit."""
        order = ConfigRecord(
            {
                "clients": [message.metadata.dst_node_id for message in messages],
                "together": self._group_size,
                "num-partitions": self._clients,
                "message-type": messages[0].metadata.message_type,
                "seconds": seconds,
            }
        )
        uses_state = messages[0].metadata.message_type.split(".")[0] == MessageType.TRAIN or self._evaluates_with_state
        states = self.client_state.pack(map(_client, messages)) if uses_state else {}
        content = RecordDict({**messages[0].content, "simulation": self._simulation, ORDER_RECORD: order, **states})
        return Message(content, dst_node_id=node, message_type=COHORT_MESSAGE_TYPE)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Messages to clients that travel as one message to a node.

    Attributes:
        index: which batch of the round the messages were in at first.
        messages: to one client each.
        failures: how many nodes have failed over them.
        not_before: on the monotonic clock, when they may be sent.
    """

    index: int
    messages: Sequence[Message]
    failures: int = 0
    not_before: float = 0.0

    def split_for_retry(self, group_size: int) -> list[_Batch]:
        """Return the batches to send after a node failed; none after the last attempt."""
        count, size, failures = len(self.messages), len(self.messages), self.failures + 1
        if count > group_size:
            size, failures = group_size, 0
        elif failures >= len(_PAUSES) and count > 1:
            size, failures = 1, 0
        elif failures > len(_PAUSES):
            return []
        not_before = time.monotonic() + _PAUSES[max(0, failures - 1)]
        batches = []
        for start in range(0, count, size):
            part = self.messages[start : start + size]
            batches.append(_Batch(self.index, part, failures, not_before))
        return batches


class _Dispatcher:
    """Sends the batches of a round to the nodes, and collects their answers.

    A batch over which a node failed is cut into the groups that train together, which are sent
    again. A group over which two nodes failed is cut into single clients, each of which is sent
    three times at most.

    Attributes:
        under_way: message id to the batch and its node. A message that was given up in an earlier
            exchange has no batch here, but its node is busy until it has answered.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Sequence[int],
        late: Mapping[str, int],
        failed: dict[int, float],
        spool: ReplySpool | None,
        timeout: float | None,
        batches: Sequence[Sequence[Message]],
        group_size: int,
    ) -> None:
        self._grid = grid
        self._spool = spool
        self._group_size = group_size
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        # At the deadline nodes begin with no further client; replies under way may still arrive.
        self._end = math.inf if timeout is None else self._deadline + min(_GRACE, timeout / 4)
        self._wait = _SHORTEST_WAIT
        self._idle_nodes = deque(node for node in nodes if node not in late.values())
        self._failed = failed
        self._to_send = deque(_Batch(index, messages) for index, messages in enumerate(batches))
        self._missing = {index: set(map(_client, messages)) for index, messages in enumerate(batches)}
        self._answers: dict[int, Answers] = {index: {} for index in self._missing}
        self.under_way: dict[str, tuple[_Batch | None, int]] = {}
        for message_id, node in late.items():
            self.under_way[message_id] = (None, node)

    @property
    def can_send(self) -> bool:
        """True if a node is idle, a batch is due, and there is time."""
        return bool(self._idle_nodes) and time.monotonic() < self._deadline and self._next_batch is not None

    @property
    def _next_batch(self) -> _Batch | None:
        """First batch that need not wait any longer."""
        now = time.monotonic()
        return next((batch for batch in self._to_send if batch.not_before <= now), None)

    def is_complete(self, index: int) -> bool:
        """Return whether each client of this batch of the round has an answer."""
        return not self._missing[index]

    def pop_answers(self, index: int) -> Answers:
        """Return the answers of this batch of the round, and forget them."""
        return self._answers.pop(index)

    def send_next(self, pack: Callable[[Sequence[Message], int, float], Message]) -> None:
        """Send the next batch to an idle node; one that does not accept it gets no more."""
        if (batch := self._next_batch) is None:
            return
        node = self._idle_nodes.popleft()
        message = pack(batch.messages, node, self._deadline - time.monotonic())
        message_ids = [message_id for message_id in self._grid.push_messages([message]) if message_id]
        if message_ids:
            self._to_send.remove(batch)
            self.under_way[message_ids[0]] = (batch, node)

    def receive(self, next_index: int) -> bool:
        """Collect the answers that have arrived, and tell whether there were any.

        The caller takes the batch `next_index` next, so its replies stay in memory.
        """
        answers = list(self._grid.pull_messages(list(self.under_way))) if self.under_way else []
        for answer in answers:
            message_id = answer.metadata.reply_to_message_id
            if message_id not in self.under_way:
                continue  # it came twice
            batch, node = self.under_way.pop(message_id)
            self._release_node(node, failed=answer.has_error())
            if batch is None or self.is_complete(batch.index):
                continue
            replies = unpack_answers(answer)
            retries = batch.split_for_retry(self._group_size) if isinstance(replies, str) else []
            if retries:
                count = len(batch.messages)
                clients = "client is" if count == 1 else f"{count} clients are"
                log.warning("a node failed (%s); its %s asked again", replies, clients)
                self._to_send.extendleft(reversed(retries))
            else:
                self._record_replies(batch, replies, next_index)
        return bool(answers)

    def _release_node(self, node: int, *, failed: bool) -> None:
        """Let a node that has answered have further batches.

        A node that failed gets none while others work: it fails quickly, and would get all that
        remain.
        """
        others_work = self._idle_nodes or any(batch is not None for batch, _ in self.under_way.values())
        if failed:
            self._failed[node] = time.monotonic()
        else:
            self._failed.pop(node, None)
        if not failed or not others_work:
            self._idle_nodes.append(node)

    def _record_replies(self, batch: _Batch, replies: Answers | str, next_index: int) -> None:
        for client in map(_client, batch.messages):
            if isinstance(replies, str):
                reply = error_reply(f"{NODE_FAILED} {batch.failures + 1} times ({replies})")
            else:
                reply = replies.get(client) or error_reply("no reply")
            self._answers[batch.index][client] = reply
            if batch.index != next_index:  # it may have to wait long for those before it
                _store(reply, self._spool)
        self._missing[batch.index] -= set(map(_client, batch.messages))

    def wait_or_give_up(self, index: int) -> None:
        """Pause, or give up this batch of the round where there is nothing to wait for."""
        late = time.monotonic() > self._deadline
        if time.monotonic() > self._end:
            self._give_up(index, TOO_LATE)
        elif not self.under_way and (late or not (self._to_send and self._idle_nodes)):
            self._give_up(index, TOO_LATE if late else f"{NODE_FAILED}: no node takes messages any more")
        else:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _give_up(self, index: int, reason: str) -> None:
        self._answers[index] |= {client: error_reply(reason) for client in self._missing[index]}
        self._missing[index] = set()


def make_simulation(config: Config) -> ConfigRecord:
    """Return what simulated clients need of an experiment and no real server would know.

    `CohortGrid` adds it to messages below the strategy, which therefore does not see it.
    """
    server_tables = ("adversary", "attack", "truth", "recording", "strategy", "secure_aggregation", "central_privacy")
    hidden: Any = dict.fromkeys(server_tables, True)
    hidden["training"] = {"sends"}  # the strategy's message tells it
    return ConfigRecord({"experiment": config.model_dump_json(exclude=hidden), "run": secrets.token_hex(8)})


def error_reply(reason: str) -> dict[str, Any]:
    """Return the records of a client that failed."""
    return {"error": ConfigRecord({"reason": reason})}


def _client(message: Message) -> int:
    return message.metadata.dst_node_id


def unpack_answers(answer: Message) -> Answers | str:
    """Return each client's records, or the reason why there are none."""
    if answer.has_error():
        return summarise_failure(answer.error.reason or "its node failed")
    answers: Answers = {}
    for key, record in answer.content.items():
        owner, _, name = key.partition("/")
        if not owner.isdecimal():
            return f"its node answered for '{owner}', which is not a client"
        answers.setdefault(int(owner), {})[name] = record
        if isinstance(record, ArrayRecord):
            try:
                make_lazy(record)
            except Exception as error:  # NumPy may raise almost anything at bytes that are no array
                answers[int(owner)] |= error_reply(f"its arrays cannot be read: {error_reason(error)}")
    return answers


def _store(reply: Mapping[str, Any], spool: ReplySpool | None) -> None:
    for record in reply.values():
        if spool is not None and isinstance(record, ArrayRecord):
            spool.store(record)


def _make_reply(answer: dict[str, Any], message: Message) -> Message:
    """Return the ordinary Flower reply to one logical message."""
    if "error" in answer:
        reason = one_line(str(answer["error"]["reason"]))
        return Message(Error(code=_CLIENT_FAILED, reason=reason), reply_to=message)
    return Message(ReplyRecords(answer), reply_to=message)
