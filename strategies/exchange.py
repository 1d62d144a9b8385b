"""Messages that a server sends at once, and their replies, read as updates of the model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import Array, Message, MessageType, RecordDict
from torch import Tensor

from fedsim.base.errors import PayloadError, error_reason, one_line
from fedsim.federation.engines.arrays import LazyArray, read_state
from fedsim.recording.header import DIFFERS_BY_CLIENT, EXAMPLE_COUNT_KEYS, MAX_CLIENT_ID, RECORDABLE, parse_count
from fedsim.recording.messages import RecordedExchange, RecordedMessage
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, Update

PARTITION_KEY = "partition-id"
"""Metric, or config value, in which a client reports its partition id, which names the client."""
GROUP_RECORD, MEMBERS_KEY = "fedsim.group", "members"
"""Config record, and its key, in which the sum over a group names its clients."""
_EMPTY_KEY = "_empty"
"""Placeholder that Flower's legacy layer puts into a record that holds no arrays."""
_ROUND_KEYS = ("server-round", "server_round", "current-round", "current_round", "round")
"""Names under which servers send the number of the round in their config."""
_MIN_DIGITS_OF_NO_ROUND = 19
"""A group id of this many digits or more is not the number of a round."""
_STATUS_RECORD, _METRICS_RECORD = "fitres.status", "fitres.metrics"
"""ConfigRecords of Flower's legacy layer, with the status of a client and its metrics."""


@dataclass(frozen=True)
class MessageContent:
    """Copy of a message's content as it passed; its receiver may change the original afterwards.

    Arrays are shared with the original.

    Attributes:
        arrays: record to its arrays by name; records without arrays are left out.
        metrics: record to its metrics.
        config: record to its values.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    metrics: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Mapping[str, Any]]

    @classmethod
    def copy_of(cls, content: RecordDict) -> MessageContent:
        """Copy what is in `content` now."""
        arrays: dict[str, dict[str, Array]] = {}
        for key, record in content.array_records.items():
            named_arrays = {name: array for name, array in record.items() if name != _EMPTY_KEY}
            if named_arrays:
                arrays[key] = named_arrays
        return cls(
            arrays=arrays,
            metrics={key: dict(record) for key, record in content.metric_records.items()},
            config={key: dict(record) for key, record in content.config_records.items()},
        )

    def metric_values(self) -> dict[str, Any]:
        """Return all metrics by key; a key that two records share is RECORD.KEY in the second."""
        metrics: dict[str, Any] = {}
        legacy_metrics = self.config.get(_METRICS_RECORD, {})
        for name, record in (*self.metrics.items(), (_METRICS_RECORD, legacy_metrics)):
            metrics |= {key if key not in metrics else f"{name}.{key}": value for key, value in record.items()}
        return metrics

    def facts(self) -> dict[str, Any]:
        """Return the config values that are booleans, numbers or texts."""
        facts: dict[str, Any] = {}
        for record in self.config.values():
            facts |= {key: value for key, value in record.items() if isinstance(value, bool | int | float | str)}
        return facts

    @property
    def has_only_numbers(self) -> bool:
        """Return whether a client sent only arrays, numbers and its partition id."""
        config_keys = {key for record in self.config.values() for key in record}
        return config_keys <= {PARTITION_KEY} and all(_is_number(value) for value in self.metric_values().values())


@dataclass(frozen=True)
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
        self.unreadable_reason = ""
        """Reason why an array that was sent cannot be recorded; it is left out."""
        self.kind = messages[0].metadata.message_type if messages else ""
        self.group = messages[0].metadata.group_id if messages else ""
        self._count_keys = dict.fromkeys((count, *EXAMPLE_COUNT_KEYS))
        self.server_messages: list[ServerMessage] = self._copy_messages(messages)
        self._messages = list(messages)
        self._index_of_id: dict[str, int] = {}
        self.abandoned_indices = set[int]()
        """Indices of messages to which nobody waits for a reply any more."""
        self.awaited_indices = set[int]()
        """Indices of messages whose replies were requested."""
        self.repeat_repliers = set[int]()
        """Nodes that answered a message more than once; the first answer counts."""
        self._replies: dict[int, MessageContent | str] = {}  # by index of the message that they answer

    def _copy_messages(self, messages: Sequence[Message]) -> list[ServerMessage]:
        # Nearly always all messages share one content, so each distinct one is read only once.
        contents = {id(message.content): MessageContent.copy_of(message.content) for message in messages}
        distinct_contents = {_array_identity(content): content for content in contents.values()}
        states = {identity: self._read_state(content) for identity, content in distinct_contents.items()}
        server_messages: list[ServerMessage] = []
        messages_to_node: dict[int, int] = {}
        for message in messages:
            node, content = message.metadata.dst_node_id, contents[id(message.content)]
            messages_to_node[node] = messages_to_node.get(node, 0) + 1
            state = states[_array_identity(content)]
            server_messages.append(ServerMessage(node, messages_to_node[node], content, state))
        return server_messages

    def _read_state(self, content: MessageContent) -> State:
        state, reasons = _read_tensors(content, "the server")
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
        return self.kind.partition(".")[0] == "train" and any(message.before for message in self.server_messages)

    def absorb(self, other: Exchange) -> bool:
        """Add the later `other` to this, if both are single messages of one kind and round."""
        is_similar = (self.kind, self.round) == (other.kind, other.round) and len(other.server_messages) == 1
        if not is_similar or {message.node for message in self.server_messages} & {
            message.node for message in other.server_messages
        }:
            return False
        self.server_messages += other.server_messages
        self._messages += other._messages
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
    def is_open(self) -> bool:
        """Return whether replies may still come."""
        return bool(set(range(len(self.server_messages))) - self._replies.keys() - self.abandoned_indices)

    def await_replies(self, message_ids: Collection[str]) -> None:
        """Note that somebody requests the replies to the messages with these ids."""
        ids = [message.metadata.message_id for message in self._messages]
        self.awaited_indices |= {index for index, message_id in enumerate(ids) if message_id in message_ids}

    def give_up(self, messages: Sequence[Message]) -> None:
        """Note that somebody waited for replies to these messages, and waits no longer."""
        closed = {id(message) for message in messages}
        indices = {index for index, message in enumerate(self._messages) if id(message) in closed}
        self.awaited_indices |= indices
        self.abandoned_indices |= indices

    def add_reply(self, reply: Message) -> bool:
        """Copy `reply` if it answers one of these messages, and return whether it does."""
        if (index := self.index_of(reply, self._replies)) is None:
            return False
        if index in self._replies:
            self.repeat_repliers.add(self.server_messages[index].node)
        else:
            self._replies[index] = self.read_reply(reply)
        return True

    def index_of(self, reply: Message, answered: Container[int]) -> int | None:
        """Return the index of the message that `reply` answers, None where it answers none of them.

        Args:
            reply: a reply of a client, or of the SuperLink about it.
            answered: indices of the messages that have an answer already.
        """
        replied_id = reply.metadata.reply_to_message_id
        if replied_id and len(self._index_of_id) < len(self._messages):
            ids = [message.metadata.message_id for message in self._messages]
            self._index_of_id = {message_id: index for index, message_id in enumerate(ids) if message_id}
        if replied_id and self._index_of_id:
            return self._index_of_id.get(replied_id)
        # Without ids, take the first message to this node that is not answered.
        node = reply.metadata.src_node_id
        indices = [index for index, message in enumerate(self.server_messages) if message.node == node]
        for index in indices:
            if index not in answered:
                return index
        return indices[0] if indices else None

    def read_reply(self, reply: Message) -> MessageContent | str:
        """Return a copy of what a reply holds now, or the reason of its error."""
        if reply.has_error():
            return one_line(reply.error.reason or "no reason given")
        return MessageContent.copy_of(reply.content) if reply.has_content() else "neither content nor an error"

    @property
    def fits_in_updates(self) -> bool:
        """Return whether a recording of the updates alone would hold everything that was sent."""
        _, differing = self.facts
        return not differing and all(
            isinstance(reply, str) or reply.has_only_numbers for reply in self._replies.values()
        )

    @cached_property
    def facts(self) -> tuple[dict[str, Any], str]:
        """Return the facts that all clients were sent alike, and the names of those that differ.

        The names of differing facts are also among the facts, as `DIFFERS_BY_CLIENT`.
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
        if failure := _failure_reason(content):
            return failure
        if not asked.before or not content.arrays:
            return None
        several = len(asked.content.arrays) > 1 or len(content.arrays) > 1
        arrays, reasons = _read_tensors(content, "it", several=several)
        if not arrays:
            return reasons[0]
        before = _prefix_names(asked) if several else asked.before
        try:
            payload = Payload.from_dense(arrays, "weights") if several else Payload.from_arrays(arrays, before)
        except PayloadError as error:
            return one_line(str(error))
        metrics = {key: float(value) for key, value in content.metric_values().items() if _is_number(value)}
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
            members=_group_members(content),
            message=asked.message,
            remarks=(*reasons, *map(one_line, payload.remarks(before))),
        )

    def count_examples(self, content: MessageContent) -> int:
        """Return N as a client reports it; 0 where it does not."""
        metrics = content.metric_values()
        return next((parse_count(metrics[key]) for key in self._count_keys if key in metrics), 0)

    def to_recording(
        self, number: int, recorded_as: int, names: Mapping[int, int], recorded: Collection[int]
    ) -> RecordedExchange:
        """Return all messages and replies for a recording.

        Arrays that the recorded rounds hold are left out: models that were sent, and updates.

        Args:
            number: number of this exchange.
            recorded_as: the round that its updates are recorded as; 0 if there are none.
            names: node to the id of its client.
            recorded: clients whose updates are recorded.
        """
        # Arrays of queries are in no round; models to train and to evaluate are.
        is_query = self.kind.split(".")[0] == MessageType.QUERY
        sent = [
            _record_message(message.node, message.content, names, arrays=is_query) for message in self.server_messages
        ]
        replies: list[RecordedMessage] = []
        for message, reply in self.replies:
            is_recorded = names.get(message.node, message.node) in recorded
            replies.append(_record_message(message.node, reply, names, arrays=not is_recorded))
        for index, message in enumerate(self.server_messages):
            if index not in self._replies:
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


def client_name(content: MessageContent, node: int) -> int:
    """Return the id of the client: the partition id that it reports, or else the id of its node."""
    partitions = [record[PARTITION_KEY] for record in content.config.values() if PARTITION_KEY in record]
    reported = content.metric_values().get(PARTITION_KEY, partitions[0] if partitions else node)
    return parse_count(reported, node, MAX_CLIENT_ID)


def _group_members(content: MessageContent) -> tuple[int, ...]:
    """Return the clients whose sum a reply is; none where it does not name a list of clients."""
    members = content.config.get(GROUP_RECORD, {}).get(MEMBERS_KEY, ())
    if not isinstance(members, list):
        return ()
    is_valid = all(type(client) is int and 0 <= client <= MAX_CLIENT_ID for client in members)
    return tuple(sorted(set(members))) if is_valid else ()


def describe_wrong_records(content: RecordDict) -> str | None:
    """Return why a reply lacks the record of arrays and that of metrics, of each one, or None.

    Flower's strategies need both.
    """
    for kind, records in (("arrays", content.array_records), ("metrics", content.metric_records)):
        if len(records) != 1:
            return f"it sent {len(records)} records of {kind}, expected one"
    return None


def _read_tensors(content: MessageContent, sender: str, *, several: bool | None = None) -> tuple[State, list[str]]:
    """Return the arrays as tensors, and for each that cannot be recorded the reason.

    Args:
        content: the content of a message.
        sender: its sender, for the reasons.
        several: whether arrays are called RECORD/NAME; by default where there are several records.
    """
    if several is None:
        several = len(content.arrays) > 1
    state: dict[str, Tensor] = {}
    reasons: list[str] = []
    for record, arrays in content.arrays.items():
        for name, array in arrays.items():
            try:
                tensor = read_state({name: array})[name]
            except Exception as error:  # NumPy may raise almost anything at bytes that are no array
                reasons.append(one_line(f"{sender} sent '{name}', which cannot be read: {error_reason(error)}"))
                continue
            if tensor.dtype in RECORDABLE:
                state[f"{record}/{name}" if several else name] = tensor
            else:
                reasons.append(one_line(f"{sender} sent '{name}' as {tensor.dtype}, which cannot be recorded"))
    return state, reasons


def _prefix_names(message: ServerMessage) -> State:
    """Return the state of a message under names `RECORD/NAME`, even of a single record."""
    if len(message.content.arrays) > 1:
        return message.before
    (record,) = message.content.arrays
    return {f"{record}/{name}": tensor for name, tensor in message.before.items()}


def _array_identity(content: MessageContent) -> object:
    """Return a key that is equal for messages that hold the very same arrays."""
    return tuple(
        (record, name, id(array if isinstance(array, LazyArray) else array.data))
        for record, arrays in content.arrays.items()
        for name, array in arrays.items()
    )


def _failure_reason(content: MessageContent) -> str | None:
    """Return the reason of a client of Flower's legacy API that reports a failure, or None."""
    status = content.config.get(_STATUS_RECORD, {})
    if status.get("code", 0) == 0:
        return None
    return one_line(str(status.get("message") or f"its status is {status['code']}"))


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


def _is_number(value: object) -> bool:
    """Return whether it is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < sys.float_info.max)
