"""Report the progress of long work to those who listen: the command line, or a Python caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
ProgressListener = Callable[[str, int, int], None]
"""Callback `listener(work, done, total)`."""
ROUNDS = "fedsim.rounds"
"""Logger of the line at the end of each round; a screen may show only some of these."""
_SECONDS_BETWEEN_REPORTS = 0.2
# No ContextVar: the Ray engine runs the ServerApp, which reports rounds, in a thread of its own.
_listeners: list[ProgressListener] = []


@contextmanager
def listen_to_progress(listener: ProgressListener | None) -> Iterator[None]:
    """Call `listener`, if there is one, with all progress of this process in the block.

    >>> with listen_to_progress(print):
    ...     report_progress("clients", 3, 12)
    clients 3 12
    """
    if listener is None:
        yield
        return
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_progress(work: str, done: int, total: int) -> None:
    """Report that `done` of `total` steps of `work` are done; 0 starts it, `total` ends it."""
    for listener in tuple(_listeners):
        listener(work, done, total)


def track(items: Iterable[T], work: str, total: int) -> Iterator[T]:
    """Yield `items` and report the number done, at most five times a second."""
    report_progress(work, 0, total)
    last_report = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() > last_report + _SECONDS_BETWEEN_REPORTS:
            report_progress(work, min(count, total - 1), total)
            last_report = time.monotonic()
    report_progress(work, total, total)
