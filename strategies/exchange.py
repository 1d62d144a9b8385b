"""A set of messages that a server sends at once, and what comes back: read as updates where it is that."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import Array, Message, MessageType, RecordDict
from torch import Tensor

from fedsim.engines.arrays import Held, state_in
from fedsim.errors import PayloadError, one_line, what_it_said
from fedsim.recording.header import COUNTS, DIFFERING, MOST, RECORDABLE, count_in
from fedsim.recording.messages import Messages, Sent
from fedsim.wire.messages import State, Update
from fedsim.wire.payloads import Payload

PARTITION = "partition-id"
"""Metric, or value of a config, by which a client says which partition of the data it holds; it names the client."""
GROUP, MEMBERS = "fedsim.group", "members"
"""Config, and its value, by which a reply says that it is the sum over a group, and over whom."""
"""Where clients report N: by Flower's message API, and by its legacy clients."""
_EMPTY = "_empty"
"""What Flower's legacy layer puts into a record that holds no arrays."""
_ROUNDS = ("server-round", "server_round", "current-round", "current_round", "round")
"""What servers call the round in the config that they send."""
_DIGITS = 19
"""A number of as many digits is no round."""
_STATUS, _METRICS = "fitres.status", "fitres.metrics"
"""Where Flower's legacy layer says whether a client succeeded, and what else it reports; both are ConfigRecords."""


@dataclass(frozen=True)
class Content:
    """What a message held when it passed; whoever gets it may change it afterwards. Arrays are shared.

    Attributes:
        arrays: by record, its arrays by name; records without arrays are left out.
        metrics: by record, its metrics.
        config: by record, its values.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    metrics: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, content: RecordDict) -> Content:
        """What is in `content` now."""
        arrays = {
            key: {name: array for name, array in record.items() if name != _EMPTY}
            for key, record in content.array_records.items()
        }
        return cls(
            arrays={key: record for key, record in arrays.items() if record},
            metrics={key: dict(record) for key, record in content.metric_records.items()},
            config={key: dict(record) for key, record in content.config_records.items()},
        )

    def values(self) -> dict[str, Any]:
        """All metrics by their keys; one that two records have is called RECORD.KEY in the second."""
        found: dict[str, Any] = {}
        for name, record in (*self.metrics.items(), (_METRICS, self.config.get(_METRICS, {}))):
            found |= {key if key not in found else f"{name}.{key}": value for key, value in record.items()}
        return found

    def facts(self) -> dict[str, Any]:
        """The plain values of its config."""
        return {
            key: value
            for record in self.config.values()
            for key, value in record.items()
            if isinstance(value, bool | int | float | str)
        }

    @property
    def is_plain(self) -> bool:
        """Whether all that a client said beside its arrays are numbers, and which partition it holds."""
        said = {key for record in self.config.values() for key in record}
        return said <= {PARTITION} and all(_is_number(value) for value in self.values().values())


@dataclass(frozen=True)
class Asked:
    """One message of the server.

    Attributes:
        node: whom it was sent to.
        message: the how manieth message to this node it is among those sent at once, counted from 1.
        content: what it held.
        before: its arrays as tensors, as `RECORD/NAME` where there are several records; empty if there are none.
    """

    node: int
    message: int
    content: Content
    before: State


class Exchange:
    """Messages that a server sends at once, and their replies.

    Args:
        messages: what it sends, before anybody can change them.
        count: the metric in which clients report N, if it is another one than `COUNTS`.
    """

    def __init__(self, messages: Sequence[Message], count: str = COUNTS[0]) -> None:
        self.unreadable = ""
        """Why an array that was sent cannot be recorded; it is left out."""
        self.kind = messages[0].metadata.message_type if messages else ""
        self.group = messages[0].metadata.group_id if messages else ""
        self._counts = dict.fromkeys((count, *COUNTS))
        contents = {id(message.content): Content.of(message.content) for message in messages}
        alike = {_identity(content): content for content in contents.values()}  # nearly always one
        states = {identity: self._readable(content) for identity, content in alike.items()}
        self.asked: list[Asked] = []
        asked_of: dict[int, int] = {}
        for message in messages:
            node, content = message.metadata.dst_node_id, contents[id(message.content)]
            asked_of[node] = asked_of.get(node, 0) + 1
            self.asked.append(Asked(node, asked_of[node], content, states[_identity(content)]))
        self._messages = list(messages)
        self._places: dict[str, int] = {}  # of messages in `asked`, by the ids that they get as they are sent
        self.given_up = set[int]()
        """Places in `asked` of messages to which nobody waits for a reply any more."""
        self.waited_for = set[int]()
        """Places in `asked` of messages whose replies were asked for."""
        self.doubled = set[int]()
        """Nodes that answered a message more than once; the first answer counts."""
        self._replies: dict[int, Content | str] = {}  # by the place in `asked` of what they answer

    def _readable(self, content: Content) -> State:
        """The arrays of a message; `unreadable` says if one cannot be recorded."""
        state, refused = _tensors(content, "the server")
        if refused:
            self.unreadable = refused[0]
        return state

    @property
    def round(self) -> int:
        """The round as the messages say it; 0 where they do not."""
        group = self.group if len(self.group) < _DIGITS and self.group.isascii() else ""
        told = [facts[key] for asked in self.asked[:1] for key in _ROUNDS if key in (facts := asked.content.facts())]
        for said in (*told, int(group) if group.isdigit() else 0):
            if type(said) is int and 0 < said < MOST:
                return said
        return 0

    @property
    def trains(self) -> bool:
        """Whether clients were sent a model and may have returned an update of it."""
        return self.kind.partition(".")[0] == "train" and any(asked.before for asked in self.asked)

    def joined_by(self, other: Exchange) -> bool:
        """Take `other` in, which was sent later, if both are single messages of one kind and round."""
        alike = (self.kind, self.round) == (other.kind, other.round) and len(other.asked) == 1
        if not alike or {asked.node for asked in self.asked} & {asked.node for asked in other.asked}:
            return False
        self.asked += other.asked
        self._messages += other._messages
        return True

    @property
    def replies(self) -> list[tuple[Asked, Content | str]]:
        """Messages that were answered, by node, each with what the node said, or the reason of its error."""
        answered = [(self.asked[place], said) for place, said in self._replies.items()]
        return sorted(answered, key=lambda answer: (answer[0].node, answer[0].message))

    @property
    def silent_nodes(self) -> set[int]:
        """Nodes that did not answer a message though their reply was asked for."""
        return {self.asked[place].node for place in self.waited_for - self._replies.keys()}

    @property
    def is_open(self) -> bool:
        """Whether replies may still come."""
        return bool(set(range(len(self.asked))) - self._replies.keys() - self.given_up)

    def wait_for(self, message_ids: Collection[str]) -> None:
        """Note that somebody asks for the replies to the messages with these ids."""
        ids = [message.metadata.message_id for message in self._messages]
        self.waited_for |= {place for place, number in enumerate(ids) if number in message_ids}

    def give_up(self, messages: Sequence[Message]) -> None:
        """Note that somebody waited for replies to these messages, and waits no longer."""
        ended = {id(message) for message in messages}
        places = {place for place, message in enumerate(self._messages) if id(message) in ended}
        self.waited_for |= places
        self.given_up |= places

    def takes(self, reply: Message) -> bool:
        """Note `reply` as it is now, if it answers one of these messages."""
        if (place := self.place_of(reply, self._replies)) is None:
            return False
        if place in self._replies:
            self.doubled.add(self.asked[place].node)
        else:
            self._replies[place] = self.said(reply)
        return True

    def place_of(self, reply: Message, answered: Container[int]) -> int | None:
        """Return the place in `asked` of the message that `reply` answers, None where it answers none of them.

        Args:
            reply: of a client, or of the SuperLink about it.
            answered: the places of messages that have an answer already.
        """
        to = reply.metadata.reply_to_message_id
        if to and len(self._places) < len(self._messages):
            ids = [message.metadata.message_id for message in self._messages]
            self._places = {number: place for place, number in enumerate(ids) if number}
        if to and self._places:
            return self._places.get(to)
        # Messages have no ids before a Grid sends them: the first one to this node that is not answered.
        places = [place for place, asked in enumerate(self.asked) if asked.node == reply.metadata.src_node_id]
        return next((place for place in places if place not in answered), places[0] if places else None)

    def said(self, reply: Message) -> Content | str:
        """What a reply holds now, or the reason of its error."""
        if reply.has_error():
            return one_line(reply.error.reason or "no reason given")
        return Content.of(reply.content) if reply.has_content() else "neither content nor an error"

    @property
    def is_plain(self) -> bool:
        """Whether a recording of its updates has everything that was said."""
        return not self.facts[1] and all(isinstance(said, str) or said.is_plain for said in self._replies.values())

    @cached_property
    def facts(self) -> tuple[dict[str, Any], str]:
        """The facts that all clients are sent alike, with `DIFFERING` for others; and the names of those."""
        contents = {id(asked.content): asked.content for asked in self.asked}  # nearly always one
        told = [content.facts() for content in contents.values()]
        by_all = set.intersection(*({(key, repr(fact)) for key, fact in facts.items()} for facts in told))
        same = {key: fact for key, fact in told[0].items() if (key, repr(fact)) in by_all}
        if not (differing := sorted({key for facts in told for key in facts} - set(same))):
            return same, ""
        return same | {DIFFERING: ", ".join(differing)}, ", ".join(differing)

    def update(
        self, number: int, asked: Asked, client: int, content: Content, config: Mapping[str, Any]
    ) -> Update | str | None:
        """What a client answered to `asked`, as an update of round `number`, why that cannot be recorded, or None."""
        if wrong := _failed(content):
            return wrong
        if not asked.before or not content.arrays:
            return None
        several = len(asked.content.arrays) > 1 or len(content.arrays) > 1
        arrays, refused = _tensors(content, "it", several=several)
        if not arrays:
            return refused[0]
        before = _prefixed(asked) if several else asked.before
        try:
            payload = Payload.dense(arrays, "weights") if several else Payload.from_arrays(arrays, before)
        except PayloadError as error:
            return one_line(str(error))
        metrics = {key: float(value) for key, value in content.values().items() if _is_number(value)}
        for key in (PARTITION, *self._counts):
            metrics.pop(key, None)
        return Update(
            round=number,
            client=client,
            before=before,
            payload=payload,
            num_examples=self.count(content),
            metrics=metrics,
            config=config,
            records=tuple(content.arrays) if several else (),
            members=_members(content),
            message=asked.message,
            remarks=(*refused, *map(one_line, payload.remarks(before))),
        )

    def count(self, content: Content) -> int:
        """N, as a client reports it; 0 where it does not."""
        said = content.values()
        return next((count_in(said[key]) for key in self._counts if key in said), 0)

    def messages(self, number: int, recorded_as: int, names: Mapping[int, int], recorded: Collection[int]) -> Messages:
        """Everything that passed, but for arrays of models that were sent and those of recorded updates.

        Args:
            number: of this exchange.
            recorded_as: the round that its updates are recorded as; 0 if there are none.
            names: what clients are called, by their nodes.
            recorded: clients whose updates are recorded.
        """
        # Of a query nobody else says what was sent; models to train and to evaluate are in the rounds.
        asks = self.kind.split(".")[0] == MessageType.QUERY
        sent = [_sent(asked.node, asked.content, names, arrays=asks) for asked in self.asked]
        replies = [
            _sent(asked.node, said, names, arrays=names.get(asked.node, asked.node) not in recorded)
            for asked, said in self.replies
        ]
        for place, asked in enumerate(self.asked):
            if place not in self._replies:
                why = "no reply" if place in self.waited_for else "nobody asked for its reply"
                replies.append(_sent(asked.node, why, names, arrays=False))
        return Messages(
            number=number,
            kind=self.kind,
            round=self.round,
            recorded_as=recorded_as,
            sent=sent,
            replies=sorted(replies, key=lambda reply: reply.client),
        )


def name_of(content: Content, node: int) -> int:
    """What a client is called: by the partition id that it reports, or else by its node."""
    told = [record[PARTITION] for record in content.config.values() if PARTITION in record]
    return count_in(content.values().get(PARTITION, told[0] if told else node), node, MOST)


def _members(content: Content) -> tuple[int, ...]:
    """Over whom a reply is the sum; nobody where it is of one client, or what it says is no list of clients."""
    said = content.config.get(GROUP, {}).get(MEMBERS, ())
    whole = isinstance(said, list) and all(type(client) is int and 0 <= client <= MOST for client in said)
    return tuple(sorted(set(said))) if whole else ()


def miscounted(content: RecordDict) -> str | None:
    """Why a reply has not one record of arrays and one of metrics, as Flower's strategies need it, or None."""
    for kind, records in (("arrays", content.array_records), ("metrics", content.metric_records)):
        if len(records) != 1:
            return f"it sent {len(records)} records of {kind}, expected one"
    return None


def _tensors(content: Content, sender: str, *, several: bool | None = None) -> tuple[State, list[str]]:
    """Return all arrays as tensors, and why others cannot be recorded.

    Args:
        content: what was sent.
        sender: who sent it, in the sentences.
        several: whether arrays are called RECORD/NAME; by default where there are several records.
    """
    if several is None:
        several = len(content.arrays) > 1
    state: dict[str, Tensor] = {}
    refused: list[str] = []
    for record, arrays in content.arrays.items():
        for name, array in arrays.items():
            try:
                tensor = state_in({name: array})[name]
            except Exception as error:  # NumPy may raise almost anything at bytes that are no array
                refused.append(one_line(f"{sender} sent '{name}', which cannot be read: {what_it_said(error)}"))
                continue
            if tensor.dtype in RECORDABLE:
                state[f"{record}/{name}" if several else name] = tensor
            else:
                refused.append(one_line(f"{sender} sent '{name}' as {tensor.dtype}, which cannot be recorded"))
    return state, refused


def _prefixed(asked: Asked) -> State:
    """The state of a message under names `RECORD/NAME`, though it may have one record only."""
    if len(asked.content.arrays) > 1:
        return asked.before
    (record,) = asked.content.arrays
    return {f"{record}/{name}": tensor for name, tensor in asked.before.items()}


def _identity(content: Content) -> object:
    """Equal for messages that hold the very same arrays."""
    return tuple(
        (record, name, id(array if isinstance(array, Held) else array.data))
        for record, arrays in content.arrays.items()
        for name, array in arrays.items()
    )


def _failed(content: Content) -> str | None:
    """Why a client of Flower's legacy API says that it failed, or None."""
    status = content.config.get(_STATUS, {})
    if status.get("code", 0) == 0:
        return None
    return one_line(str(status.get("message") or f"its status is {status['code']}"))


def _sent(node: int, said: Content | str, names: Mapping[int, int], *, arrays: bool) -> Sent:
    if isinstance(said, str):
        return Sent(node=node, client=names.get(node, node), error=said)
    return Sent(
        node=node,
        client=names.get(node, node),
        config=said.config,
        metrics=said.metrics,
        arrays={
            record: {name: _kept(array) if arrays else _told(array) for name, array in held.items()}
            for record, held in said.arrays.items()
        },
    )


def _kept(array: Array) -> Any:
    """The values of an array, or the bytes that were sent where they are no array that a file can hold."""
    try:
        values = array.numpy()
        if values.dtype.kind in "fiub":
            return values.astype(values.dtype.newbyteorder("="), copy=False)
        return bytes(array.data)
    except Exception:  # a stranger's bytes
        return bytes(array.data)


def _told(array: Array) -> str:
    return f"{array.dtype or array.stype} {tuple(array.shape)}"


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < sys.float_info.max)
