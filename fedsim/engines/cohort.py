"""Many logical clients over few physical nodes.

Flower carries one message a client: each holds its own copy of the global model, and each costs
about as much as training a small network. Here one physical message carries the broadcast once and
names the logical clients that its node shall play; the strategy still sees one message a client.
Logical node ids are partition ids, so sampling and recordings do not depend on Flower's random ids,
and replies are handed over in the order of those ids, so sums do not depend on who was faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsim.errors import FedsimError

COHORT = "query.cohort"
_ORDER = "cohort"
_FAILED = 2


class CohortGrid(Grid):
    """A Grid of `clients` logical nodes, numbered from 0, over the nodes of a physical Grid.

    Args:
        physical: carries the messages.
        clients: number of logical clients.
        simulation: sent along for the ClientApp alone (which data to load, which defenses to use);
            the strategy, and so the curious server, never sees it.
        nodes: ids of the physical nodes; client `k` is played by node `k` modulo their number.
    """

    def __init__(self, physical: Grid, clients: int, simulation: ConfigRecord, nodes: Sequence[int]) -> None:
        self._physical = physical
        self._clients = clients
        self._simulation = simulation
        self._nodes = nodes
        self._replies: dict[str, Message] = {}
        self._sent = 0

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
        for reply, message in self._exchange(list(messages), timeout=None):
            self._sent += 1
            ids.append(f"{message.metadata.dst_node_id}-{self._sent}")
            self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """One reply a message, ascending by client; who did not answer has an error reply."""
        return [reply for reply, _ in self._exchange(list(messages), timeout)]

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[tuple[Message, Message]]:
        alike: dict[tuple[int, str], list[Message]] = defaultdict(list)
        for message in messages:
            alike[id(message.content), message.metadata.message_type].append(message)
        orders = [order for group in alike.values() for order in self._pack(group)]
        answers: dict[int, dict[str, Any]] = defaultdict(dict)
        broken: dict[int, str] = {}
        for answer in self._physical.send_and_receive(orders, timeout=timeout):
            if answer.has_error():
                broken[answer.metadata.src_node_id] = answer.error.reason or "its node failed"
                continue
            for key, record in answer.content.items():
                owner, name = key.split("/", 1)
                answers[int(owner)][name] = record
        pairs = []
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            client = message.metadata.dst_node_id
            why = broken.get(self._node_of(client), "no reply in time")
            pairs.append((_reply(answers.get(client), why, message), message))
        return pairs

    def _node_of(self, client: int) -> int:
        return self._nodes[client % len(self._nodes)]

    def _pack(self, group: Sequence[Message]) -> Iterable[Message]:
        members: dict[int, list[int]] = defaultdict(list)
        for message in group:
            members[self._node_of(message.metadata.dst_node_id)].append(message.metadata.dst_node_id)
        for node, clients in members.items():
            order = ConfigRecord(
                {
                    "clients": sorted(clients),
                    "num-partitions": self._clients,
                    "message-type": group[0].metadata.message_type,
                }
            )
            content = RecordDict({**group[0].content, "simulation": self._simulation, _ORDER: order})
            yield Message(content, dst_node_id=node, message_type=COHORT)


def play_cohort(app: ClientApp, message: Message, context: Context) -> Message:
    """Let `app` answer for every logical client that a cohort message names.

    A client that raises, or answers with an error, becomes an error reply of that client alone.
    """
    order: dict[str, Any] = dict(message.content.config_records[_ORDER])
    shared = {key: record for key, record in message.content.items() if key != _ORDER}
    answers = RecordDict()
    for client in order["clients"]:
        address = _addressed(message.metadata, client, order["message-type"])
        logical = Message(content=RecordDict(shared), metadata=address)  # type: ignore[call-overload]
        own = Context(
            run_id=context.run_id,
            node_id=client,
            node_config={"partition-id": client, "num-partitions": order["num-partitions"]},
            state=RecordDict(),
            run_config=context.run_config,
        )
        try:
            reply = app(logical, own)
        except Exception as error:
            reason = str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"
            answers[f"{client}/error"] = ConfigRecord({"reason": reason})
            continue
        if reply.has_error():
            answers[f"{client}/error"] = ConfigRecord({"reason": reply.error.reason or "no reason given"})
            continue
        for key, record in reply.content.items():
            answers[f"{client}/{key}"] = record
    return Message(answers, reply_to=message)


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


def _reply(answer: dict[str, Any] | None, why: str, message: Message) -> Message:
    """The ordinary Flower reply to one logical message."""
    if answer is None:
        return Message(Error(code=_FAILED, reason=why), reply_to=message)
    if "error" in answer:
        return Message(Error(code=_FAILED, reason=str(answer["error"]["reason"])), reply_to=message)
    return Message(RecordDict(answer), reply_to=message)
