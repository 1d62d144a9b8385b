"""The honest-but-curious server: wraps any Flower strategy, records, never alters.

    strategy = Curious(FedAvg(), "recording")

is all that an existing Flower app needs. The strategy's own `start` then runs over a `CuriousGrid`, which writes down
what is sent and what comes back. The aggregate is bit-identical with and without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.engines.arrays import as_plain, state_in
from fedsim.errors import ConfigError, one_line, what_it_said
from fedsim.recording.recorder import Recorder
from fedsim.wire.payloads import is_encoded
from strategies.curious_grid import CuriousGrid
from strategies.exchange import COUNTS, Exchange, miscounted
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
        ConfigError: the strategy is one of Flower's legacy API.
        RunError: the folder cannot be written.
        TranscriptError: the folder of the `Recorder` already holds a recording.
    """

    _OWN = frozenset({"strategy", "recorder", "_observer", "_exchange", "_asked", "_recording", "_started"})

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
        self._asked: dict[int, Message] = {}

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
        """Pass on what `strategy` sends, and remember it."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        self._exchange = self._observer.asks(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the replies, then let `strategy` aggregate them.

        Raises:
            RunError: the round could not be written.
        """
        exchange, asked = self._exchange, self._asked
        if exchange is None or not self.recorder.plan.keeps_round(server_round):
            return self.strategy.aggregate_train(server_round, (_decoded(reply, asked) for reply in replies))
        seen: list[Message] = []
        if isinstance(replies, Sequence):
            seen = list(replies)
            self._observer.record(server_round, exchange, seen)
        else:
            self._observer.record(server_round, exchange, _noted(replies, seen))
        return self.strategy.aggregate_train(server_round, [_decoded(reply, asked) for reply in seen])

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
        self._asked: dict[int, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        messages = list(messages)
        self._asked |= {message.metadata.dst_node_id: message for message in messages}
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return [_decoded(reply, self._asked) for reply in super().pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        messages = list(messages)
        asked = {message.metadata.dst_node_id: message for message in messages}
        return [_decoded(reply, asked) for reply in super().send_and_receive(messages, timeout=timeout)]


def _decoded(reply: Message, asked: Mapping[int, Message]) -> Message:
    """What a strategy gets of a reply: the reply itself, unless it is a payload that no strategy can read."""
    question = asked.get(reply.metadata.src_node_id)
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
