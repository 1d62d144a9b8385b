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

_MOST_OPEN = 8
"""Sets of messages that wait for replies, with all their arrays, at a time; the oldest is then written as it is."""


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
        if name == "grid":  # asked for before there is one, as copying does
            raise AttributeError(name)
        return getattr(self.grid, name)

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
        self._watch.asks(messages)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        message_ids = list(message_ids)
        replies = list(self.grid.pull_messages(message_ids))
        self._watch.came(replies, message_ids)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        messages = list(messages)
        exchange = self._watch.asks(messages)
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self._watch.is_over(exchange, messages, replies)
        return replies


class _Watch:
    """Which messages wait for replies.

    Flower's legacy server sends to each client of a round by itself, from several threads. Messages that are sent alone
    are therefore taken together as long as they are of one kind and one round.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._open: list[Exchange] = []
        self._single: Exchange | None = None  # the one that further single messages may join
        self._lock = threading.RLock()

    def asks(self, messages: Sequence[Message]) -> Exchange | None:
        """What is sent now, before anybody can change it."""
        with self._lock:
            exchange = self._observer.asks(messages)
            if exchange is None:
                return None
            if self._single is not None and self._single.joined_by(exchange):
                return self._single
            self._single = exchange if len(exchange.asked) == 1 and exchange.round else None
            self._open.append(exchange)
            self._write_done()
            return exchange

    def came(self, replies: Iterable[Message], message_ids: Sequence[str]) -> None:
        """Note replies, and that those to the messages with these ids were asked for; write down what is complete."""
        with self._lock:
            for exchange in self._open:
                exchange.wait_for(set(message_ids))
            for reply in replies:
                if not any(self._observer.takes(exchange, reply) for exchange in reversed(self._open)):
                    flower.warning(
                        "fedsim: a reply of node %d is not recorded, because what it answers is closed", _node(reply)
                    )
            self._write_done()

    def is_over(self, exchange: Exchange | None, messages: Sequence[Message], replies: Iterable[Message]) -> None:
        """Note these replies to these messages of `exchange`: no others will be waited for."""
        with self._lock:
            if exchange is None:
                return
            for reply in replies:
                self._observer.takes(exchange, reply)
            exchange.give_up(messages)
            self._write_done()

    def close(self) -> None:
        """Write down what is left."""
        with self._lock:
            for exchange in self._open:
                self._observer.write(exchange)
            self._open, self._single = [], None

    def _write_done(self) -> None:
        """Write down what no reply will come to, and the oldest of too many sets of messages that wait."""
        done = [exchange for exchange in self._open if exchange is not self._single and not exchange.is_open]
        sets = [exchange for exchange in self._open if exchange not in done and len(exchange.asked) > 1]
        for exchange in [*done, *sets[:-_MOST_OPEN]]:
            self._open.remove(exchange)
            self._observer.write(exchange)


def _node(reply: Message) -> int:
    return reply.metadata.src_node_id


class _Audited(ServerApp):
    def __init__(self, app: ServerApp, recording: Recorder | Path | str, count: str) -> None:
        super().__init__()
        self._app, self._recording, self._count = app, recording, count

    def __call__(self, grid: Grid, context: Context) -> None:
        with CuriousGrid(grid, self._recording, count=self._count) as watched:
            self._app(watched, context)


def audit(server_app: ServerApp, recording: Recorder | Path | str, *, count: str = "num-examples") -> ServerApp:
    """A ServerApp that does what `server_app` does, while a `CuriousGrid` writes down what its server sees.

    Args:
        server_app: any ServerApp, with a main function or with Flower's legacy `server_fn`.
        recording, count: see `CuriousGrid`.
    """
    return _Audited(server_app, recording, count)
