"""Recording of a server at the Grid, through which all its messages pass.

    grid = CuriousGrid(grid, "recording")     # in any main function
    app = record_app(app, "recording")        # for a ServerApp whose code cannot be edited

All strategies, custom round loops, Flower's legacy workflows and SecAgg+ communicate through the
Grid.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsim.recording.recorder import Recorder
from strategies.exchange import Exchange, refuse_encoded
from strategies.observer import Observer, flower_log, new_run_recorder
from strategies.wrapped_grid import WrappedGrid

_MAX_OPEN_EXCHANGES = 8
"""Largest number of exchanges in memory that wait for replies; then the oldest is written."""


class CuriousGrid(WrappedGrid):
    """Grid that passes all messages of another Grid on unchanged, and records them.

    Args:
        grid: any Grid of Flower.
        recording: a folder, in which each run gets a sub-folder, or a `Recorder`.
        count: the metric in which clients report N, if it is not Flower's `num-examples`.
        decodes: whether deltas, and updates that a defense of fedsim made sparse or quantised, are
            decoded for a strategy that reads dense weights or gradients alone.
        partitions: by node, the client that it plays, where that is known.

    Raises:
        RunError: the folder cannot be written when it is made. Failures to record a message later
            are only logged, in Flower's log.
    """

    def __init__(
        self,
        grid: Grid,
        recording: Recorder | Path | str,
        *,
        count: str = "num-examples",
        decodes: bool = False,
        partitions: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(grid)
        recorder = recording if isinstance(recording, Recorder) else new_run_recorder(recording)
        self.recording = recorder.folder.parent
        self._open_exchanges = _OpenExchanges(Observer(recorder, count, partitions), decodes=decodes)
        # Called at the latest when the program ends.
        self._finalizer = weakref.finalize(self, self._open_exchanges.close)
        flower_log.info("fedsim: what this server sees is recorded in %s", self.recording)

    @property
    def losses(self) -> list[str]:
        """Return what could not be recorded, in the words of the log."""
        return self._open_exchanges.losses

    def close(self) -> None:
        """Record the messages that still wait for replies."""
        self._finalizer()

    def __enter__(self) -> CuriousGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Record messages, then send them, and return their ids."""
        messages = list(messages)
        self._open_exchanges.add_messages(messages)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages with these ids, and record them."""
        message_ids = list(message_ids)
        replies = list(self.grid.pull_messages(message_ids))
        return self._open_exchanges.add_replies(replies, message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, wait for their replies, and record both."""
        messages = list(messages)
        exchange = self._open_exchanges.add_messages(messages)
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        return self._open_exchanges.end_exchange(exchange, messages, replies)


class _OpenExchanges:
    """Exchanges that wait for replies; each is written once no more replies can come.

    Flower's legacy server sends to each client of a round separately, from several threads. Single
    messages of one kind and round are therefore joined into one exchange.
    """

    def __init__(self, observer: Observer, *, decodes: bool) -> None:
        self._observer, self.losses = observer, observer.losses
        self._decodes = decodes
        self._exchanges: list[Exchange] = []
        self._joinable: Exchange | None = None  # the one that further single messages may join
        self._lock = threading.RLock()

    def add_messages(self, messages: Sequence[Message]) -> Exchange | None:
        """Copy messages before they are sent, and return the exchange that they belong to."""
        with self._lock:
            exchange = self._observer.open_exchange(messages)
            if exchange is None:
                return None
            if self._joinable is not None and self._joinable.absorb(exchange):
                return self._joinable
            self._joinable = exchange if len(exchange.server_messages) == 1 and exchange.round else None
            self._observer.number_exchange(exchange)
            self._exchanges.append(exchange)
            self._write_complete()
            return exchange

    def add_replies(self, replies: Iterable[Message], message_ids: Sequence[str]) -> list[Message]:
        """Copy replies requested for the messages with these ids, and write complete exchanges.

        Returns:
            The replies for the server.
        """
        with self._lock:
            for exchange in self._exchanges:
                exchange.await_replies(set(message_ids))
            server_replies = [self._add_reply(reply, list(reversed(self._exchanges))) for reply in replies]
            self._write_complete()
            return server_replies

    def end_exchange(
        self, exchange: Exchange | None, messages: Sequence[Message], replies: list[Message]
    ) -> list[Message]:
        """Copy the replies to `messages` of `exchange`, after which no others are awaited.

        Returns:
            The replies for the server.
        """
        with self._lock:
            if exchange is None:  # its messages could not be read, which the log tells
                return [refuse_encoded(reply) for reply in replies] if self._decodes else replies
            server_replies = [self._add_reply(reply, [exchange]) for reply in replies]
            exchange.give_up(messages)
            self._write_complete()
            return server_replies

    def _add_reply(self, reply: Message, exchanges: Sequence[Exchange]) -> Message:
        """Copy `reply` to the first of `exchanges` that it answers, and return it for the server."""
        for exchange in exchanges:
            index = self._observer.add_reply(exchange, reply)
            if index is not None:
                return exchange.decode_reply(reply, index) if self._decodes else reply
        node = reply.metadata.src_node_id
        self._observer.log_loss(f"a reply of node {node} is not recorded, because what it answers is closed")
        return refuse_encoded(reply) if self._decodes else reply

    def close(self) -> None:
        """Write all exchanges that are left."""
        with self._lock:
            for exchange in self._exchanges:
                self._observer.write_exchange(exchange)
            self._exchanges, self._joinable = [], None

    def _write_complete(self) -> None:
        """Write exchanges that no reply will come to, and the oldest of too many that wait."""
        complete = [exchange for exchange in self._exchanges if exchange is not self._joinable and not exchange.is_open]
        waiting = [
            exchange for exchange in self._exchanges if exchange not in complete and len(exchange.server_messages) > 1
        ]
        for exchange in [*complete, *waiting[:-_MAX_OPEN_EXCHANGES]]:
            self._exchanges.remove(exchange)
            self._observer.write_exchange(exchange)


class _RecordedServerApp(ServerApp):
    def __init__(self, app: ServerApp, recording: Recorder | Path | str, count: str) -> None:
        super().__init__()
        self._app, self._recording, self._count = app, recording, count

    def __call__(self, grid: Grid, context: Context) -> None:
        with CuriousGrid(grid, self._recording, count=self._count) as recording_grid:
            self._app(recording_grid, context)


def record_app(server_app: ServerApp, recording: Recorder | Path | str, *, count: str = "num-examples") -> ServerApp:
    """Return a ServerApp that runs `server_app` over a `CuriousGrid`, which records its messages.

    Args:
        server_app: any ServerApp, with a main function or with Flower's legacy `server_fn`.
        recording, count: see `CuriousGrid`.
    """
    return _RecordedServerApp(server_app, recording, count)
