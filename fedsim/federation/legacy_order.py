"""Order of the clients of Flower's legacy server, which asks them in threads."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.server import server as legacy_server


class _NumberedFuture(concurrent.futures.Future[Any]):
    """Future that knows which one it is, and is done at once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _OrderedExecutor:
    """Takes the place of a pool of threads: it does what is submitted at once, and in that order."""

    def __init__(self, max_workers: int | None = None) -> None:
        del max_workers
        self._num_submitted = 0

    def __enter__(self) -> _OrderedExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> _NumberedFuture:
        """Call the function; the future has its result."""
        future, self._num_submitted = _NumberedFuture(self._num_submitted), self._num_submitted + 1
        try:
            future.set_result(function(*arguments, **settings))
        except Exception as error:
            future.set_exception(error)
        return future


def _wait_in_order(
    fs: Iterable[_NumberedFuture], timeout: float | None = None
) -> tuple[list[_NumberedFuture], set[Any]]:
    """Return these futures, all of which are done, in their order."""
    del timeout
    return sorted(fs, key=lambda future: future.number), set()


@contextmanager
def order_legacy_clients() -> Iterator[None]:
    """Let the server of Flower's legacy API ask one client after the other, and aggregate in that order.

    It asks in threads, and keeps what they answer in a set, so that sums would be rounded otherwise in each run.
    """
    ordered = SimpleNamespace(
        ThreadPoolExecutor=_OrderedExecutor, wait=_wait_in_order, Future=concurrent.futures.Future
    )
    with patch.object(legacy_server, "concurrent", SimpleNamespace(futures=ordered)):
        yield
