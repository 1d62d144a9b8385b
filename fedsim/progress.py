"""Progress of long work, as log lines that are shown and not kept; `fedsim.cli.screen` shows them.

Log lines are used because they pass between threads, and from a deployed ServerApp to the command line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
LOGGER = "fedsim.progress"
ROUNDS = "fedsim.rounds"
"""Logger of the line that each round ends with, of which a screen may show a few only."""
log = logging.getLogger(LOGGER)
_PAUSE = 0.2


def tell(what: str, done: int, total: int) -> None:
    """Say that `done` of `total` steps of `what` are done; 0 begins anew, `total` ends it."""
    log.debug("%s: %d of %d", what, done, total)


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Pass `items` on and tell how many of `total` came, a few times a second at most."""
    tell(what, 0, total)
    told = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() > told + _PAUSE:
            tell(what, min(count, total - 1), total)
            told = time.monotonic()
    tell(what, total, total)


def heard(message: str) -> tuple[str, int, int] | None:
    """What `tell` was called with, out of the line that it logged; None of another line."""
    found = re.fullmatch(r"(.*): (\d+) of (\d+)", message, re.DOTALL)
    return (found[1], int(found[2]), int(found[3])) if found else None
