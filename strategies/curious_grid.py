"""The honest-but-curious server, watched at the wire: records at the Grid, whatever sits above it.

    grid = CuriousGrid(grid, "recording")     # in a main function of any kind
    app = audit(app, "recording")             # of a ServerApp whose code cannot be edited

Every strategy, a round loop of one's own, Flower's legacy workflows and SecAgg+ send and receive through the Grid.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedsim.recording.recorder import Recorder
from strategies.exchange import Exchange
from strategies.observer import Observer, flower, in_folder


class CuriousGrid(Grid):
    """Passes on what `grid` sends and receives, without touching it, and writes it down.

    Args:
        grid: any Grid of Flower.
        recording: a folder, in which each run gets a sub-folder of its own, or a `Recorder`.
        count: the metric in which clients report N, if it is another one than Flower's `num-examples`.

    Raises:
        RunError: the folder cannot be written. Later, nothing raises: Flower's log says what is not recorded.
    """

    def __init__(self, grid: Grid, recording: Recorder | Path | str, *, count: str = "num-examples") -> None:
        self.grid = grid
        recorder = recording if isinstance(recording, Recorder) else in_folder(recording)
        self.recording = recorder.folder.parent
        self._watch = _Watch(Observer(recorder, count))
        self._end = weakref.finalize(self, self._watch.close)  # also where the program ends
        flower.info("fedsim: what this server sees is recorded in %s", self.recording)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["grid"], name)

    def close(self) -> None:
        """Write down what waits for replies that will not come."""
        self._end()

    def __enter__(self) -> CuriousGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def set_run(self, run: Any) -> None:
        """See Grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """See Grid."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """See Grid."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        messages = list(messages)
        exchange = self._watch.asks(messages)
        ids = self.grid.push_messages(messages)
        self._watch.waits_for(exchange)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        replies = list(self.grid.pull_messages(message_ids))
        self._watch.came(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        messages = list(messages)
        exchange = self._watch.asks(messages)
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self._watch.is_over(exchange, replies)
        return replies


class _Watch:
    """Which messages wait for replies.

    Flower's legacy server sends to each client of a round by itself, from several threads. Messages that are sent alone
    are therefore taken together as long as they are of one kind and one round.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._waiting: list[Exchange] = []
        self._single: Exchange | None = None
        self._lock = threading.RLock()

    def asks(self, messages: Sequence[Message]) -> Exchange | None:
        """What is sent now, before anybody can change it."""
        with self._lock:
            exchange = self._observer.asks(messages)
            if exchange is None or (self._single is not None and self._single.joined_by(exchange)):
                return self._single if exchange is not None else None
            self._write_single()
            self._single = exchange if len(exchange.asked) == 1 and exchange.round else None
            return exchange

    def waits_for(self, exchange: Exchange | None) -> None:
        """Note that replies to these messages will be pulled."""
        with self._lock:
            if exchange is not None and exchange is not self._single:
                self._waiting.append(exchange)

    def came(self, replies: Iterable[Message]) -> None:
        """Note replies; write down what is complete."""
        with self._lock:
            for reply in replies:
                there = [*reversed(self._waiting), *([self._single] if self._single is not None else [])]
                if not any(exchange.takes(reply) for exchange in there):
                    flower.warning("fedsim: a reply of node %d answers nothing that was sent", _node(reply))
            for exchange in [exchange for exchange in self._waiting if not exchange.waiting]:
                self._waiting.remove(exchange)
                self._observer.write(exchange)

    def is_over(self, exchange: Exchange | None, replies: Iterable[Message]) -> None:
        """Note these replies, and write down `exchange`: no others will be waited for."""
        with self._lock:
            if exchange is None:
                return
            for reply in replies:
                exchange.takes(reply)
            if exchange is not self._single:
                self._observer.write(exchange)

    def close(self) -> None:
        """Write down what is left."""
        with self._lock:
            self._write_single()
            for exchange in self._waiting:
                self._observer.write(exchange)
            self._waiting.clear()

    def _write_single(self) -> None:
        if self._single is not None:
            self._observer.write(self._single)
            self._single = None


def _node(reply: Message) -> int:
    return reply.metadata.src_node_id


class _Audited(ServerApp):
    def __init__(self, app: ServerApp, recording: Recorder | Path | str) -> None:
        super().__init__()
        self._app, self._recording = app, recording

    def __call__(self, grid: Grid, context: Context) -> None:
        with CuriousGrid(grid, self._recording) as watched:
            self._app(watched, context)


def audit(server_app: ServerApp, recording: Recorder | Path | str) -> ServerApp:
    """A ServerApp that does what `server_app` does, while a `CuriousGrid` writes down what its server sees.

    Args:
        server_app: any ServerApp, with a main function or with Flower's legacy `server_fn`.
        recording: see `CuriousGrid`.
    """
    return _Audited(server_app, recording)
