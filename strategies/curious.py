"""The honest-but-curious server: wraps any Flower strategy, records, never alters.

    strategy = Curious(FedAvg(), "runs/audit")

is all that an existing Flower app needs. The wrapper notes what `configure_train` sends and what
`aggregate_train` receives, writes each reply down as it comes, before the inner strategy sees it,
and delegates. The aggregate is bit-identical with and without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.engines.arrays import as_plain, state_in
from fedsim.errors import PayloadError, RunError, one_line, what_it_said
from fedsim.recording.header import DIFFERING, MOST, RECORDABLE
from fedsim.recording.recorder import Recorder
from fedsim.wire.messages import State, Update
from fedsim.wire.payloads import Payload

_NO_PAYLOAD = 2
_Record = TypeVar("_Record")
log = logging.getLogger("fedsim." + __name__)


class Curious(Strategy):
    """Record every `(w_t, payload, N)` that passes `strategy`: weights, gradients or deltas, as clients sent them.

    A delta, and what is sparse or quantised, reaches `strategy` decoded: as weights, or dense gradients.

    Args:
        strategy: any Flower strategy, differential-privacy wrappers included.
        recording: a run folder, or a `Recorder` for more control over what is kept where.

    Raises:
        RunError: `strategy` has a round loop of its own, which a wrapper would not see, or the
            folder cannot be written.
        TranscriptError: the folder already holds a recording.
    """

    def __init__(self, strategy: Strategy, recording: Recorder | Path | str) -> None:
        if type(strategy).start is not Strategy.start:
            raise RunError(
                f"{type(strategy).__name__} overrides Strategy.start, so its messages would pass Curious by; "
                "wrap the strategy that its round loop calls instead"
            )
        self.strategy = strategy
        self.recorder = (
            recording if isinstance(recording, Recorder) else Recorder(Path(recording).resolve() / "transcript")
        )
        self._asked: dict[int, Message] = {}
        self._sent: dict[int, State] = {}
        self._config: dict[str, object] = {}
        self._differing = ""

    def summary(self) -> None:
        """See Strategy."""
        log.info("recording to %s", self.recorder.folder)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pass on what `strategy` sends, and remember it."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        self._sent, self._config = {}, {}
        states: dict[int, State] = {}
        for node, message in self._asked.items():
            record = _only(message.content.array_records)
            if id(record) not in states:
                states[id(record)] = state_in(record)
            self._sent[node] = states[id(record)]
        if messages and self.recorder.plan.keeps_round(server_round):
            self._config = self._told_all(messages, server_round)
        return messages

    def _told_all(self, messages: Iterable[Message], server_round: int) -> dict[str, object]:
        """The facts that all clients are sent alike, and which others there are; says so the first time."""
        contents = {id(message.content): message.content for message in messages}  # nearly always one
        told = [_facts(content) for content in contents.values()]
        told_by_all = set.intersection(*({(key, repr(fact)) for key, fact in facts.items()} for facts in told))
        same = {key: fact for key, fact in told[0].items() if (key, repr(fact)) in told_by_all}
        if not (differing := sorted({key for facts in told for key in facts} - set(same))):
            return same
        names = ", ".join(differing)
        if names != self._differing:
            log.warning("round %d: clients are not all sent the same %s; it is not recorded", server_round, names)
            self._differing = names
        return same | {DIFFERING: names}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the replies, then let `strategy` aggregate them.

        Raises:
            RunError: the round could not be written.
        """
        if not self.recorder.plan.keeps_round(server_round) or not self._sent:
            return self.strategy.aggregate_train(server_round, map(self._plain, replies))
        seen: list[Message] = []
        failures: dict[int, str] = {}
        updates: Iterable[Update] = self._updates(server_round, replies, seen, failures)
        if isinstance(replies, Sequence):
            updates = list(updates)  # they are all here: record them by client, not as they came
        kept = sum(map(self.recorder.plan.keeps_client, self._sent))
        self.recorder.write(server_round, updates, failures, self._config, expected=kept)
        return self.strategy.aggregate_train(server_round, [self._plain(reply) for reply in seen])

    def _plain(self, reply: Message) -> Message:
        """What `strategy` gets of a reply: the reply itself, unless it is a payload that no strategy can read."""
        node = reply.metadata.src_node_id
        if reply.has_error() or node not in self._sent or miscounted(reply.content):
            return reply
        ((key, record),) = reply.content.array_records.items()
        try:
            plain = as_plain(record, self._sent[node])
        except Exception as error:  # a PayloadError, or whatever NumPy raises at bytes that are no array
            return Message(Error(code=_NO_PAYLOAD, reason=one_line(what_it_said(error))), reply_to=self._asked[node])
        return (
            reply if plain is record else Message(RecordDict({**reply.content, key: plain}), reply_to=self._asked[node])
        )

    def _updates(
        self, server_round: int, replies: Iterable[Message], seen: list[Message], failures: dict[int, str]
    ) -> Iterator[Update]:
        for reply in replies:
            seen.append(reply)
            node = reply.metadata.src_node_id
            if reply.has_error():
                failures[node] = one_line(reply.error.reason or "no reason given")
                continue
            payload = self._payload(reply)
            if isinstance(payload, str):  # what the strategy makes of it is for the strategy to say
                log.warning("round %d, client %d: %s; recorded as a failure", server_round, node, payload)
                failures[node] = payload
            else:
                yield self._update(server_round, reply, payload)

    def _payload(self, reply: Message) -> Payload | str:
        """What the client sent, or why that cannot be recorded as an update."""
        content = reply.content
        if miscount := miscounted(content):
            return miscount
        try:
            arrays = state_in(_only(content.array_records))
        except Exception as error:  # NumPy may raise almost anything at bytes that are no array
            return one_line(f"its arrays cannot be read: {what_it_said(error)}")
        if strange := [name for name, tensor in arrays.items() if tensor.dtype not in RECORDABLE]:
            return one_line(f"it sent '{strange[0]}' as {arrays[strange[0]].dtype}, which cannot be recorded")
        before = self._sent[reply.metadata.src_node_id]
        try:
            payload = Payload.from_arrays(arrays, before)
        except PayloadError as error:
            return one_line(str(error))
        wrong = payload.misfit(before)
        return one_line(wrong) if wrong else payload

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See Strategy; not recorded."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """See Strategy; not recorded."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def _update(self, server_round: int, reply: Message, payload: Payload) -> Update:
        node, content = reply.metadata.src_node_id, reply.content
        metrics = {
            key: float(value) for key, value in _only(content.metric_records).items() if isinstance(value, int | float)
        }
        return Update(
            round=server_round,
            client=_count(metrics.pop("partition-id", node), node),
            before=self._sent[node],
            payload=payload,
            num_examples=_count(metrics.pop(_weight_key(self.strategy), 0), 0),
            metrics=metrics,
            config=self._config,
        )


def _count(reported: float, otherwise: int) -> int:
    """What a client reports as a count, `otherwise` where it is none: no reply may stop the federation here."""
    return int(reported) if math.isfinite(reported) and 0 <= reported < MOST else otherwise


def _weight_key(strategy: Strategy) -> str:
    """Where clients report N; privacy wrappers leave that to the strategy inside them."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return getattr(strategy, "weighted_by_key", "num-examples")


def miscounted(content: RecordDict) -> str | None:
    """Why a reply has not one record of arrays and one of metrics, or None."""
    for kind, records in (("arrays", content.array_records), ("metrics", content.metric_records)):
        if len(records) != 1:
            return f"it sent {len(records)} records of {kind}, expected one"
    return None


def _only(records: Mapping[str, _Record]) -> _Record:
    """The one record of a message; Flower's strategies send and accept exactly one of each kind."""
    if len(records) != 1:
        raise RunError(f"expected one record of each kind in a message, got {sorted(records)}")
    return next(iter(records.values()))


def _facts(content: RecordDict) -> dict[str, object]:
    return {
        key: value
        for record in content.config_records.values()
        for key, value in record.items()
        if isinstance(value, bool | int | float | str)
    }
