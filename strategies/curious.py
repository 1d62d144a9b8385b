"""The honest-but-curious server: wraps any Flower strategy, records, never alters.

    strategy = Curious(FedAvg(), "recording")

is all that an existing Flower app needs. The strategy's own `start` then runs over a `CuriousGrid`, which writes down
what is sent and what comes back. The aggregate is bit-identical with and without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.engines.arrays import as_plain, state_in
from fedsim.errors import ConfigError, one_line, what_it_said
from fedsim.recording.header import COUNTS
from fedsim.recording.recorder import Recorder
from fedsim.wire.payloads import is_encoded
from strategies.curious_grid import CuriousGrid
from strategies.exchange import Exchange, miscounted
from strategies.observer import Observer, flower, in_folder

_NO_PAYLOAD = 2


class Curious(Strategy):
    """Record every `(w_t, payload, N)` that passes `strategy`: weights, gradients or deltas, as clients sent them.

    A delta, and what is sparse or quantised by a defense of fedsim, reaches `strategy` decoded: as weights, or dense
    gradients. What is not a method of `Strategy` is passed on to `strategy`.

    `start` records at the Grid. A round loop that calls `configure_train` and `aggregate_train` itself gets updates
    recorded, and nothing else; give it a `CuriousGrid` for the rest.

    Args:
        strategy: any Flower strategy, with a `start` of its own too.
        recording: a folder, in which each run gets a sub-folder of its own, or a `Recorder`.

    Raises:
        ConfigError: the strategy is one of Flower's legacy API; later, that another strategy is wrapped round it.
        RunError: the folder cannot be written.
        TranscriptError: the folder of the `Recorder` already holds a recording.
    """

    _OWN = frozenset({"strategy", "recorder", "_observer", "_exchange", "_questions", "_recording", "_started"})

    def __init__(self, strategy: Strategy, recording: Recorder | Path | str) -> None:
        if isinstance(strategy, LegacyStrategy):
            raise ConfigError(
                f"Curious cannot wrap {type(strategy).__name__}, a strategy of Flower's legacy API; wrap the ServerApp "
                "with fedsim.audit, or the Grid of its main function with fedsim.CuriousGrid"
            )
        self.strategy = strategy
        self.recorder = recording if isinstance(recording, Recorder) else in_folder(recording)
        self._recording, self._started = recording, False
        self._observer = Observer(self.recorder, _weight_key(strategy))
        self._exchange: Exchange | None = None
        self._questions = _Questions()

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # asked for before there is one, as copying and pickling do
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN or hasattr(type(self), name):  # what it has itself, methods too
            super().__setattr__(name, value)
        else:
            setattr(self.strategy, name, value)

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Any:
        """See Strategy; what passes `grid` is recorded, each time in a folder of its own."""
        if self._started and not isinstance(self._recording, Recorder):
            self.recorder = in_folder(self._recording)
        self._started = True
        with _Decoding(grid, self.recorder, count=_weight_key(self.strategy)) as watched:
            return self.strategy.start(watched, *args, **kwargs)

    def summary(self) -> None:
        """See Strategy."""
        flower.info("fedsim: what this server sees is recorded in %s", self.recorder.folder.parent)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pass on what `strategy` sends, and remember it.

        Raises:
            ConfigError: another strategy is wrapped round this one, so that what it makes of replies would be recorded.
        """
        self._check_outermost()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._questions = _Questions(messages)
        self._exchange = self._observer.asks(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the replies, then let `strategy` aggregate them.

        Raises:
            RunError: the round could not be written.
        """
        exchange, questions = self._exchange, self._questions
        if exchange is None or not self.recorder.plan.keeps_round(server_round):
            return self.strategy.aggregate_train(server_round, (questions.decode(reply) for reply in replies))
        seen: list[Message] = []
        if isinstance(replies, Sequence):
            seen = list(replies)
            self._observer.record(server_round, exchange, seen)
        else:
            self._observer.record(server_round, exchange, _noted(replies, seen))
        return self.strategy.aggregate_train(server_round, [questions.decode(reply) for reply in seen])

    def _check_outermost(self) -> None:
        """Raise ConfigError where another strategy calls this one, as Flower's wrappers for privacy do."""
        frame = sys._getframe(2)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Strategy) and caller is not self:
                name = type(caller).__name__
                raise ConfigError(
                    f"Curious has to be outermost: within {name} it would record what {name} makes of the replies, and "
                    f"not what clients sent; write Curious({name}(...))"
                )
            frame = frame.f_back  # type: ignore[assignment]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See Strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """See Strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)


class _Decoding(CuriousGrid):
    """A CuriousGrid that decodes, for the strategy above it, what no strategy can read."""

    def __init__(self, grid: Grid, recording: Recorder, *, count: str) -> None:
        super().__init__(grid, recording, count=count)
        self._questions = _Questions()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        messages = list(messages)
        self._questions.add(messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return [self._questions.decode(reply) for reply in super().pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        messages = list(messages)
        questions = _Questions(messages)
        return [questions.decode(reply) for reply in super().send_and_receive(messages, timeout=timeout)]


class _Questions:
    """The messages that a server sent, each to be found by a reply to it.

    Args:
        messages: the first ones.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._last: dict[int, Message] = {}  # by node
        self._waiting: list[Message] = []  # they get their ids as they are sent
        self._by_id: dict[str, Message] = {}
        self.add(messages)

    def add(self, messages: Iterable[Message]) -> None:
        """Note messages that are about to be sent."""
        for message in messages:
            self._last[message.metadata.dst_node_id] = message
            self._waiting.append(message)

    def decode(self, reply: Message) -> Message:
        """Return what a strategy gets of a reply: itself, unless it is a payload that no strategy can read."""
        self._by_id |= {m.metadata.message_id: m for m in self._waiting if m.metadata.message_id}
        self._waiting = [message for message in self._waiting if not message.metadata.message_id]
        question = self._by_id.pop(reply.metadata.reply_to_message_id, None)
        return _decoded(reply, question or self._last.get(reply.metadata.src_node_id))


def _decoded(reply: Message, question: Message | None) -> Message:
    """What a strategy gets of a reply to `question`; see `_Questions.decode`."""
    if reply.has_error() or question is None or miscounted(reply.content):
        return reply
    sent, ((key, record),) = question.content.array_records, reply.content.array_records.items()
    if len(sent) != 1 or not is_encoded(record, names := next(iter(sent.values()))):
        return reply
    try:
        plain = as_plain(record, state_in(names))
    except Exception as error:  # a PayloadError, or whatever NumPy raises at bytes that are no array
        return Message(Error(code=_NO_PAYLOAD, reason=one_line(what_it_said(error))), reply_to=question)
    return Message(RecordDict({**reply.content, key: plain}), reply_to=question)


def _noted(replies: Iterable[Message], seen: list[Message]) -> Iterator[Message]:
    """`replies`, each of which is added to `seen` first."""
    for reply in replies:
        seen.append(reply)
        yield reply


def _weight_key(strategy: Strategy) -> str:
    """Where clients report N; privacy wrappers leave that to the strategy inside them."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return str(getattr(strategy, "weighted_by_key", COUNTS[0]))
