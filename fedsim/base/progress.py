"""Progress of long work, reported by log lines that `fedsim.cli.screen` shows and no file stores.

Log lines are used because they pass between threads, and from a deployed ServerApp to the command
line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
LOGGER = "fedsim.base.progress"
ROUNDS = "fedsim.rounds"
"""Logger of the line at the end of each round; a screen may show only some of these."""
log = logging.getLogger(LOGGER)
_SECONDS_BETWEEN_REPORTS = 0.2


def report_progress(work: str, done: int, total: int) -> None:
    """Report that `done` of `total` steps of `work` are done; 0 starts it, `total` ends it."""
    log.debug("%s: %d of %d", work, done, total)


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


def parse_progress(message: str) -> tuple[str, int, int] | None:
    """Parse a line of `report_progress`: work, steps done and total; None for another line."""
    match = re.fullmatch(r"(.*): (\d+) of (\d+)", message, re.DOTALL)
    return (match[1], int(match[2]), int(match[3])) if match else None
