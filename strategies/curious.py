"""Honest-but-curious server: a wrapper of any Flower strategy that records and alters nothing.

    strategy = Curious(FedAvg(), "recording")

is all that an existing Flower app needs. The strategy's own `start` then runs over a `CuriousGrid`,
which records the messages sent and their replies. The aggregate is bit-identical with and without
it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.base.errors import ConfigError
from fedsim.recording.header import EXAMPLE_COUNT_KEYS
from fedsim.recording.recorder import Recorder
from strategies.curious_grid import CuriousGrid
from strategies.exchange import Exchange
from strategies.observer import Observer, flower_log, new_run_recorder
from strategies.reply_means import ReplyCollector


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
        average_from: bytes of the replies of a round above which a strategy that averages gets
            their mean, in rounds that come as an iterator. Above 512 MB it gets means of groups of
            replies, so that memory need not hold all; the sum is then rounded otherwise. By default
            it always gets all replies.

    Raises:
        ConfigError: the strategy is one of Flower's legacy API; or, in `configure_train`, another
            strategy wraps this one.
        RunError: the folder cannot be written.
        TranscriptError: the folder of the `Recorder` already holds a recording.
    """

    _OWN_ATTRIBUTES = frozenset(
        {"strategy", "recorder", "_observer", "_exchange", "_recording", "_average_from", "_is_started"}
    )

    def __init__(self, strategy: Strategy, recording: Recorder | Path | str, *, average_from: float = math.inf) -> None:
        if isinstance(strategy, LegacyStrategy):
            raise ConfigError(
                f"Curious cannot wrap {type(strategy).__name__}, a strategy of Flower's legacy API; wrap the ServerApp "
                "with fedsim.record_app, or the Grid of its main function with fedsim.CuriousGrid"
            )
        self.strategy = strategy
        self.recorder = recording if isinstance(recording, Recorder) else new_run_recorder(recording)
        self._recording, self._average_from, self._is_started = recording, average_from, False
        self._observer = Observer(self.recorder, _example_count_key(strategy))
        self._exchange: Exchange | None = None

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
        with CuriousGrid(grid, self.recorder, count=count_key, decodes=True) as curious_grid:
            return self.strategy.start(curious_grid, *args, **kwargs)

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
        self._exchange = self._observer.open_exchange(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the replies, then let `strategy` aggregate them.

        Raises:
            RunError: the round could not be written.
        """
        exchange = self._exchange
        if exchange is None:
            return self.strategy.aggregate_train(server_round, replies)
        matched_replies = exchange.match_replies(replies)
        limit = math.inf if isinstance(replies, Sequence) else self._average_from
        collector = ReplyCollector(self.strategy, exchange.messages, limit)
        if not self.recorder.plan.keeps_round(server_round):
            for reply, index in matched_replies:
                collector.add(exchange.decode_reply(reply, index))
        elif isinstance(replies, Sequence):
            recorded_replies = list(matched_replies)
            self._observer.record_updates(server_round, exchange, recorded_replies)
            for reply, index in recorded_replies:
                collector.add(exchange.decode_reply(reply, index))
        else:
            passed_replies = _pass_replies(exchange, matched_replies, collector)
            self._observer.record_updates(server_round, exchange, passed_replies)
        return self.strategy.aggregate_train(server_round, collector.take())

    def _check_outermost(self) -> None:
        """Raise ConfigError where another strategy wraps this one, as Flower's for privacy do."""
        frame = sys._getframe(2)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Strategy) and caller is not self:
                name = type(caller).__name__
                raise ConfigError(
                    f"Curious has to be outermost: within {name} it would record what {name} computes from the "
                    f"replies, and not what clients sent; write Curious({name}(...))"
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


def _pass_replies(
    exchange: Exchange, matched_replies: Iterable[tuple[Message, int | None]], collector: ReplyCollector
) -> Iterator[tuple[Message, int | None]]:
    """Yield each reply and then, decoded, add it to `collector`."""
    for reply, index in matched_replies:
        yield reply, index
        collector.add(exchange.decode_reply(reply, index))


def _example_count_key(strategy: Strategy) -> str:
    """Return the metric in which clients report N, which the innermost strategy names."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return str(getattr(strategy, "weighted_by_key", EXAMPLE_COUNT_KEYS[0]))
