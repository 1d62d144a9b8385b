"""Honest-but-curious server: a wrapper of any Flower strategy that records and alters nothing.

    strategy = Curious(FedAvg(), "recording")

is all that an existing Flower app needs. The strategy's own `start` then runs over a `CuriousGrid`,
which records the messages sent and their replies. The aggregate is bit-identical with and without
it.
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

from fedsim.base.errors import ConfigError, error_reason, one_line
from fedsim.federation.engines.arrays import decode_lazily, read_state
from fedsim.recording.header import EXAMPLE_COUNT_KEYS
from fedsim.recording.payloads import is_encoded
from fedsim.recording.recorder import Recorder
from strategies.curious_grid import CuriousGrid
from strategies.exchange import Exchange, describe_wrong_records
from strategies.observer import Observer, flower_log, new_run_recorder

_UNREADABLE_PAYLOAD = 2
"""Code of the error that stands for a reply whose payload cannot be decoded."""


class Curious(Strategy):
    """Record every `(w_t, payload, N)` that passes `strategy`, as the clients sent it.

    Deltas, and updates that a defense of fedsim made sparse or quantised, reach `strategy` decoded,
    as weights or as dense gradients. Attributes that `Strategy` does not have are those of
    `strategy`.

    `start` records all messages, at the Grid. A round loop that calls `configure_train` and
    `aggregate_train` itself gets only updates recorded; give it a `CuriousGrid` for the rest.

    Args:
        strategy: any Flower strategy, also one with a `start` of its own.
        recording: a folder, in which each run gets a sub-folder, or a `Recorder`.

    Raises:
        ConfigError: the strategy is one of Flower's legacy API; or, in `configure_train`, another
            strategy wraps this one.
        RunError: the folder cannot be written.
        TranscriptError: the folder of the `Recorder` already holds a recording.
    """

    _OWN_ATTRIBUTES = frozenset(
        {"strategy", "recorder", "_observer", "_exchange", "_server_messages", "_recording", "_is_started"}
    )

    def __init__(self, strategy: Strategy, recording: Recorder | Path | str) -> None:
        if isinstance(strategy, LegacyStrategy):
            raise ConfigError(
                f"Curious cannot wrap {type(strategy).__name__}, a strategy of Flower's legacy API; wrap the ServerApp "
                "with fedsim.audit, or the Grid of its main function with fedsim.CuriousGrid"
            )
        self.strategy = strategy
        self.recorder = recording if isinstance(recording, Recorder) else new_run_recorder(recording)
        self._recording, self._is_started = recording, False
        self._observer = Observer(self.recorder, _example_count_key(strategy))
        self._exchange: Exchange | None = None
        self._server_messages = _ServerMessages()

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # copying and pickling ask for it before it is set
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN_ATTRIBUTES or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.strategy, name, value)

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Any:
        """Run the strategy over `grid` and record all messages, on each call in a new folder."""
        if self._is_started and not isinstance(self._recording, Recorder):
            self.recorder = new_run_recorder(self._recording)
        self._is_started = True
        count_key = _example_count_key(self.strategy)
        with _DecodingGrid(grid, self.recorder, count=count_key) as decoding_grid:
            return self.strategy.start(decoding_grid, *args, **kwargs)

    def summary(self) -> None:
        """Log where the recording is, and the summary of the strategy."""
        flower_log.info("fedsim: what this server sees is recorded in %s", self.recorder.folder.parent)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of `strategy`, and remember them.

        Raises:
            ConfigError: another strategy wraps this one, so its modified replies would be recorded.
        """
        self._check_outermost()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._server_messages = _ServerMessages(messages)
        self._exchange = self._observer.open_exchange(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the replies, then let `strategy` aggregate them.

        Raises:
            RunError: the round could not be written.
        """
        exchange, server_messages = self._exchange, self._server_messages
        if exchange is None or not self.recorder.plan.keeps_round(server_round):
            return self.strategy.aggregate_train(server_round, (server_messages.decode(reply) for reply in replies))
        recorded_replies: list[Message] = []
        if isinstance(replies, Sequence):
            recorded_replies = list(replies)
            self._observer.record_updates(server_round, exchange, recorded_replies)
        else:
            self._observer.record_updates(server_round, exchange, _append_each(replies, recorded_replies))
        decoded_replies = [server_messages.decode(reply) for reply in recorded_replies]
        return self.strategy.aggregate_train(server_round, decoded_replies)

    def _check_outermost(self) -> None:
        """Raise ConfigError where another strategy wraps this one, as Flower's for privacy do."""
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
        """Return the messages of `strategy`."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics that `strategy` aggregates."""
        return self.strategy.aggregate_evaluate(server_round, replies)


class _DecodingGrid(CuriousGrid):
    """CuriousGrid that decodes payloads which the strategy above it could not read."""

    def __init__(self, grid: Grid, recording: Recorder, *, count: str) -> None:
        super().__init__(grid, recording, count=count)
        self._server_messages = _ServerMessages()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._server_messages.add(messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._server_messages.decode(reply) for reply in super().pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        server_messages = _ServerMessages(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        return [server_messages.decode(reply) for reply in replies]


class _ServerMessages:
    """Messages that a server sent, which replies are decoded against."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._last_to_node: dict[int, Message] = {}
        self._without_id: list[Message] = []  # a Grid gives them their ids as it sends them
        self._by_id: dict[str, Message] = {}
        self.add(messages)

    def add(self, messages: Iterable[Message]) -> None:
        """Note messages that are about to be sent."""
        for message in messages:
            self._last_to_node[message.metadata.dst_node_id] = message
            self._without_id.append(message)

    def decode(self, reply: Message) -> Message:
        """Return a reply that strategies can read: itself, unless its payload is encoded."""
        self._by_id |= {m.metadata.message_id: m for m in self._without_id if m.metadata.message_id}
        self._without_id = [message for message in self._without_id if not message.metadata.message_id]
        message = self._by_id.pop(reply.metadata.reply_to_message_id, None)
        return _decode_reply(reply, message or self._last_to_node.get(reply.metadata.src_node_id))


def _decode_reply(reply: Message, message: Message | None) -> Message:
    """Return `reply` to `message` with decoded arrays, or an error where they cannot be decoded."""
    if reply.has_error() or message is None or describe_wrong_records(reply.content):
        return reply
    broadcasts = message.content.array_records
    ((key, record),) = reply.content.array_records.items()
    if len(broadcasts) != 1:
        return reply
    broadcast = next(iter(broadcasts.values()))
    if not is_encoded(record, broadcast):
        return reply
    try:
        decoded = decode_lazily(record, read_state(broadcast))
    except Exception as error:  # a PayloadError, or any error of NumPy at bytes that are no array
        reason = one_line(error_reason(error))
        return Message(Error(code=_UNREADABLE_PAYLOAD, reason=reason), reply_to=message)
    return Message(RecordDict({**reply.content, key: decoded}), reply_to=message)


def _append_each(replies: Iterable[Message], recorded_replies: list[Message]) -> Iterator[Message]:
    """Yield each of `replies`, and append it to `recorded_replies` before."""
    for reply in replies:
        recorded_replies.append(reply)
        yield reply


def _example_count_key(strategy: Strategy) -> str:
    """Return the metric in which clients report N, which the innermost strategy names."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return str(getattr(strategy, "weighted_by_key", EXAMPLE_COUNT_KEYS[0]))
