"""Warn of what the reader of a finding should know, such as an assumption that does not hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("fedsim.adversaries")
# No ContextVar: an attack may work in several threads.
_collectors: list[Callable[[str], None]] = []
_is_discarding = ContextVar("is_discarding", default=False)


def warn(message: str) -> None:
    """Warn of something in an attack: on the terminal, in `log.txt` and beside the finding.

    Args:
        message: a sentence that names the attack or the round and client that it is about.
    """
    if _is_discarding.get():
        return
    log.warning("%s", message)
    if _collectors:
        _collectors[-1](message)


@contextmanager
def collect_warnings(collector: Callable[[str], None]) -> Iterator[None]:
    """Call `collector` with each warning of an attack in the block, but not in a block within."""
    _collectors.append(collector)
    try:
        yield
    finally:
        _collectors.remove(collector)


@contextmanager
def discard_warnings() -> Iterator[None]:
    """Drop each warning of an attack in the block, as of one that is only tried."""
    token = _is_discarding.set(True)
    try:
        yield
    finally:
        _is_discarding.reset(token)
