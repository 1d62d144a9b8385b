"""Messages that a server sends at once, and their replies, read as updates of the model."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, Error, Message, MessageType, RecordDict

from fedsim.base.errors import PayloadError, error_reason, one_line
from fedsim.federation.engines.arrays import decode_lazily
from fedsim.recording.header import DIFFERS_BY_CLIENT, EXAMPLE_COUNT_KEYS, MAX_CLIENT_ID, is_number, parse_count
from fedsim.recording.messages import RecordedExchange, RecordedMessage
from fedsim.recording.payloads import Payload, is_encoded
from fedsim.recording.wire_format import State, Update
from strategies.message_content import (
    PARTITION_KEY,
    MessageContent,
    array_identity,
    describe_wrong_records,
    failure_reason,
    group_members,
    read_reply,
    read_tensors,
)

_ROUND_KEYS = ("server-round", "server_round", "current-round", "current_round", "round")
"""Names under which servers send the number of the round in their config."""
_MIN_DIGITS_OF_NO_ROUND = 19
"""A group id of this many digits or more is not the number of a round."""
_UNREADABLE_PAYLOAD = 2
"""Code of the error that stands for a reply whose payload cannot be decoded."""


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """Message of the server to one node.

    Attributes:
        node: the node that it was sent to.
        message: its number, from 1, among the messages sent to this node at once.
        content: a copy of its content.
        before: its arrays as tensors, called `RECORD/NAME` where there are several records; empty
            if there are none.
    """

    node: int
    message: int
    content: MessageContent
    before: State


class Exchange:
    """Messages that a server sends at once, and their replies.

    Messages are known by their index in `server_messages`, because they have no ids before a Grid
    sends them.

    Args:
        messages: the messages, before anybody can change them.
        count: the metric in which clients report N, if it is another one than `EXAMPLE_COUNT_KEYS`.
    """

    def __init__(self, messages: Sequence[Message], count: str = EXAMPLE_COUNT_KEYS[0]) -> None:
        self.number = 0
        """Its place in the order in which exchanges were sent, from 1; 0 before it has one."""
        self.unreadable_reason = ""
        """Reason why an array that was sent cannot be recorded; it is left out."""
        self.kind = messages[0].metadata.message_type if messages else ""
        self.group = messages[0].metadata.group_id if messages else ""
        self._count_keys = dict.fromkeys((count, *EXAMPLE_COUNT_KEYS))
        self.server_messages: list[ServerMessage] = self._copy_messages(messages)
        self.messages = list(messages)
        """The messages as they are sent."""
        self._index_of_id: dict[str, int] = {}
        self._indices_of_node: dict[int, list[int]] = {}
        self._num_sorted = 0  # messages that `_indices_of_node` has
        self.abandoned_indices = set[int]()
        """Indices of messages to which nobody waits for a reply any more."""
        self.awaited_indices = set[int]()
        """Indices of messages whose replies were requested."""
        self.repeat_repliers = set[int]()
        """Nodes that answered a message more than once; the first answer counts."""
        self._replies: dict[int, MessageContent | str] = {}  # by index of the message that they answer

    def _copy_messages(self, messages: Sequence[Message]) -> list[ServerMessage]:
        # Nearly always all messages share one content, so each distinct one is read only once.
        contents = {id(content): content for content in (message.content for message in messages)}
        copies = {key: MessageContent.copy_of(content) for key, content in contents.items()}
        identities = {key: array_identity(content) for key, content in copies.items()}
        distinct_contents = {identities[key]: content for key, content in copies.items()}
        states = {identity: self._read_state(content) for identity, content in distinct_contents.items()}
        server_messages: list[ServerMessage] = []
        messages_to_node: dict[int, int] = {}
        for message in messages:
            node, key = message.metadata.dst_node_id, id(message.content)
            messages_to_node[node] = messages_to_node.get(node, 0) + 1
            state = states[identities[key]]
            server_messages.append(ServerMessage(node, messages_to_node[node], copies[key], state))
        return server_messages

    def _read_state(self, content: MessageContent) -> State:
        state, reasons = read_tensors(content, "the server")
        if reasons:
            self.unreadable_reason = reasons[0]
        return state

    @property
    def round(self) -> int:
        """Return the round that the messages name in their config or group id; 0 for none."""
        group = self.group if len(self.group) < _MIN_DIGITS_OF_NO_ROUND and self.group.isascii() else ""
        facts = self.server_messages[0].content.facts() if self.server_messages else {}
        candidates = [facts[key] for key in _ROUND_KEYS if key in facts]
        candidates.append(int(group) if group.isdigit() else 0)
        for number in candidates:
            if type(number) is int and 0 < number < MAX_CLIENT_ID:
                return number
        return 0

    @property
    def is_training(self) -> bool:
        """Return whether clients were sent a model and may have returned an update of it."""
        is_train = self.kind.split(".")[0] == MessageType.TRAIN
        return is_train and any(message.before for message in self.server_messages)

    def absorb(self, other: Exchange) -> bool:
        """Add the later `other` to this, if both are single messages of one kind and round."""
        is_similar = (self.kind, self.round) == (other.kind, other.round) and len(other.server_messages) == 1
        if not is_similar or {message.node for message in self.server_messages} & {
            message.node for message in other.server_messages
        }:
            return False
        self.server_messages += other.server_messages
        self.messages += other.messages
        return True

    @property
    def replies(self) -> list[tuple[ServerMessage, MessageContent | str]]:
        """Return the answered messages by node, each with its reply's content or error reason."""
        answers = [(self.server_messages[index], reply) for index, reply in self._replies.items()]
        return sorted(answers, key=lambda answer: (answer[0].node, answer[0].message))

    @property
    def silent_nodes(self) -> set[int]:
        """Return the nodes that did not answer a message though their reply was requested."""
        return {self.server_messages[index].node for index in self.awaited_indices - self._replies.keys()}

    @property
    def is_one_way(self) -> bool:
        """Return whether nobody answered, and nobody asked for an answer."""
        return not self._replies and not self.awaited_indices

    @property
    def only_delivers(self) -> bool:
        """Return whether nobody answers with arrays: answers acknowledge alone, or there are to be none."""
        answers = [reply for reply in self._replies.values() if not isinstance(reply, str)]
        return self.is_one_way or (bool(answers) and not any(answer.arrays for answer in answers))

    @property
    def is_open(self) -> bool:
        """Return whether replies may still come."""
        return bool(set(range(len(self.server_messages))) - self._replies.keys() - self.abandoned_indices)

    def await_replies(self, message_ids: Collection[str]) -> None:
        """Note that somebody requests the replies to the messages with these ids."""
        ids = [message.metadata.message_id for message in self.messages]
        self.awaited_indices |= {index for index, message_id in enumerate(ids) if message_id in message_ids}

    def give_up(self, messages: Sequence[Message]) -> None:
        """Note that somebody waited for replies to these messages, and waits no longer."""
        closed = {id(message) for message in messages}
        indices = {index for index, message in enumerate(self.messages) if id(message) in closed}
        self.awaited_indices |= indices
        self.abandoned_indices |= indices

    def add_reply(self, index: int, reply: Message) -> None:
        """Copy `reply`, which answers the message with this index."""
        if index in self._replies:
            self.repeat_repliers.add(self.server_messages[index].node)
        else:
            self._replies[index] = read_reply(reply)

    def match_replies(self, replies: Iterable[Message]) -> Iterator[tuple[Message, int | None]]:
        """Pair each reply, as it comes, with the index of the message that it answers, see `index_of`."""
        answered = set[int]()
        for reply in replies:
            index = self.index_of(reply, answered)
            if index is not None:
                answered.add(index)
            yield reply, index

    def index_of(self, reply: Message, answered: Container[int] | None = None) -> int | None:
        """Return the index of the message that `reply` answers, None where it answers none of them.

        Args:
            reply: a reply of a client, or of the SuperLink about it.
            answered: indices of the messages that have an answer already; by default those that
                have a copied one.
        """
        answered = self._replies if answered is None else answered
        replied_id = reply.metadata.reply_to_message_id
        if replied_id and len(self._index_of_id) < len(self.messages):
            ids = [message.metadata.message_id for message in self.messages]
            self._index_of_id = {message_id: index for index, message_id in enumerate(ids) if message_id}
        if replied_id and self._index_of_id:
            return self._index_of_id.get(replied_id)
        # Without ids, take the first message to this node that is not answered.
        for index in range(self._num_sorted, len(self.server_messages)):
            self._indices_of_node.setdefault(self.server_messages[index].node, []).append(index)
        self._num_sorted = len(self.server_messages)
        indices = self._indices_of_node.get(reply.metadata.src_node_id, [])
        for index in indices:
            if index not in answered:
                return index
        return indices[0] if indices else None

    def decode_reply(self, reply: Message, index: int | None) -> Message:
        """Return a reply that strategies can read: itself, unless its payload is encoded.

        A payload that cannot be decoded becomes an error, for a strategy would average its indices.

        Args:
            index: of the message that it answers, see `index_of`; None where it answers none.
        """
        if index is None:
            return refuse_encoded(reply)
        if not reply.has_content() or describe_wrong_records(reply.content):
            return reply
        key, record = next((key, value) for key, value in reply.content.items() if isinstance(value, ArrayRecord))
        asked = self.server_messages[index]
        if len(asked.content.arrays) != 1 or not is_encoded(record, asked.before):
            return reply
        try:
            content = RecordDict({**reply.content, key: decode_lazily(record, asked.before)})
        except Exception as error:  # a PayloadError, or any error of NumPy at bytes that are no array
            reason = one_line(error_reason(error))
            return Message(Error(code=_UNREADABLE_PAYLOAD, reason=reason), reply_to=self.messages[index])
        return Message(content, reply_to=self.messages[index])

    @property
    def fits_in_updates(self) -> bool:
        """Return whether a recording of the updates alone would hold everything that was sent."""
        _, differing = self.facts
        return not differing and all(
            isinstance(reply, str) or reply.has_only_numbers for reply in self._replies.values()
        )

    @property
    def facts(self) -> tuple[dict[str, Any], str]:
        """Return the facts that all clients were sent alike, and the names of those that differ.

        The names of differing facts are also among the facts, as `DIFFERS_BY_CLIENT`. Both may
        change when another message is absorbed.
        """
        # Nearly always there is one content, which all messages share.
        contents = {id(message.content): message.content for message in self.server_messages}
        facts_of_contents = [content.facts() for content in contents.values()]
        items_of_contents = [{(key, repr(fact)) for key, fact in facts.items()} for facts in facts_of_contents]
        common_items = set.intersection(*items_of_contents)
        common = {key: fact for key, fact in facts_of_contents[0].items() if (key, repr(fact)) in common_items}
        all_keys = {key for facts in facts_of_contents for key in facts}
        differing_keys = sorted(all_keys - set(common))
        if not differing_keys:
            return common, ""
        differing = ", ".join(differing_keys)
        return common | {DIFFERS_BY_CLIENT: differing}, differing

    def update(
        self, number: int, asked: ServerMessage, client: int, content: MessageContent, config: Mapping[str, Any]
    ) -> Update | str | None:
        """Read a client's answer to the message `asked` as an update of round `number`.

        Returns:
            The update; the reason why it cannot be recorded; or None where no model was sent or
            returned.
        """
        if failure := failure_reason(content):
            return failure
        if not asked.before or not content.arrays:
            return None
        several = len(asked.content.arrays) > 1 or len(content.arrays) > 1
        arrays, reasons = read_tensors(content, "it", several=several)
        if not arrays:
            return reasons[0]
        before = _prefix_names(asked) if several else asked.before
        try:
            payload = Payload.from_dense(arrays, "weights") if several else Payload.from_arrays(arrays, before)
        except PayloadError as error:
            return one_line(str(error))
        metrics = {key: float(value) for key, value in content.metric_values.items() if is_number(value)}
        for key in (PARTITION_KEY, *self._count_keys):
            metrics.pop(key, None)
        return Update(
            round=number,
            client=client,
            before=before,
            payload=payload,
            num_examples=self.count_examples(content),
            metrics=metrics,
            config=config,
            records=tuple(content.arrays) if several else (),
            members=group_members(content),
            message=asked.message,
            remarks=(*reasons, *map(one_line, payload.remarks(before))),
        )

    def count_examples(self, content: MessageContent) -> int:
        """Return N as a client reports it; 0 where it does not."""
        metrics = content.metric_values
        return next((parse_count(metrics[key]) for key in self._count_keys if key in metrics), 0)

    def to_recording(
        self, number: int, recorded_as: int, names: Mapping[int, int], recorded: Collection[int]
    ) -> RecordedExchange:
        """Return all messages and replies for a recording.

        Arrays that the recorded rounds hold are left out: models that were sent, and updates.

        Args:
            recorded_as: the round that its updates are recorded as; 0 if there are none.
            names: node to the id of its client.
            recorded: clients whose updates are recorded.
        """
        # Arrays of queries, and those that nobody answers with others, are in no round; models to train and to
        # evaluate are.
        are_kept = self.kind.split(".")[0] == MessageType.QUERY or (self.is_training and self.only_delivers)
        sent = [
            _record_message(message.node, message.content, names, arrays=are_kept) for message in self.server_messages
        ]
        replies: list[RecordedMessage] = []
        for message, reply in self.replies:
            is_recorded = names.get(message.node, message.node) in recorded
            replies.append(_record_message(message.node, reply, names, arrays=not is_recorded))
        summed = {client for _, reply in self.replies if not isinstance(reply, str) for client in group_members(reply)}
        for index, message in enumerate(self.server_messages):
            if index not in self._replies and names.get(message.node, message.node) not in summed:
                reason = "no reply" if index in self.awaited_indices else "nobody asked for its reply"
                replies.append(_record_message(message.node, reason, names, arrays=False))
        return RecordedExchange(
            number=number,
            kind=self.kind,
            round=self.round,
            recorded_as=recorded_as,
            sent=sent,
            replies=sorted(replies, key=lambda reply: reply.client),
        )


def refuse_encoded(reply: Message) -> Message:
    """Return a reply that answers no known message, or an error in its place if it is encoded."""
    if not reply.has_content() or describe_wrong_records(reply.content):
        return reply
    (record,) = reply.content.array_records.values()
    if not is_encoded(record, ()):
        return reply
    reason = "it answers no message of this round, so its payload cannot be decoded"
    return Message(Error(code=_UNREADABLE_PAYLOAD, reason=reason), reply_to=reply)


def _prefix_names(message: ServerMessage) -> State:
    """Return the state of a message under names `RECORD/NAME`, even of a single record."""
    if len(message.content.arrays) > 1:
        return message.before
    (record,) = message.content.arrays
    return {f"{record}/{name}": tensor for name, tensor in message.before.items()}


def _record_message(
    node: int, content: MessageContent | str, names: Mapping[int, int], *, arrays: bool
) -> RecordedMessage:
    """Return a message as it is recorded, with its arrays or only their types and shapes."""
    client = names.get(node, node)
    if isinstance(content, str):
        return RecordedMessage(node=node, client=client, error=content)
    recorded_arrays: dict[str, dict[str, Any]] = {}
    for record, named_arrays in content.arrays.items():
        convert = _array_values if arrays else _describe_array
        recorded_arrays[record] = {name: convert(array) for name, array in named_arrays.items()}
    return RecordedMessage(
        node=node, client=client, config=content.config, metrics=content.metrics, arrays=recorded_arrays
    )


def _array_values(array: Array) -> Any:
    """Return the values of an array, or its bytes where a file cannot hold it as an array."""
    try:
        values = array.numpy()
        if values.dtype.kind in "fiub":
            return values.astype(values.dtype.newbyteorder("="), copy=False)
        return bytes(array.data)
    except Exception:  # NumPy may raise almost anything at bytes that are no array
        return bytes(array.data)


def _describe_array(array: Array) -> str:
    return f"{array.dtype or array.stype} {tuple(array.shape)}"
