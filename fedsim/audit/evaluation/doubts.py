"""Doubts: reasons why the scores of a finding may say less, or more, than they seem to.

A finding in doubt is scored all the same. The sentence is logged, and stands in `scores.csv` and beside the verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)
_doubts: ContextVar[list[str] | None] = ContextVar("doubts", default=None)


def raise_doubt(sentence: str, *values: object) -> None:
    """Note why the finding that is judged is in doubt.

    Args:
        sentence: with a place for each of `values`, as in a log.
    """
    text = sentence % values if values else sentence
    log.warning("%s", text)
    doubts = _doubts.get()
    if doubts is not None and text not in doubts:
        doubts.append(text)


@contextmanager
def collect_doubts() -> Iterator[list[str]]:
    """Yield the list that gets the doubts of the block."""
    doubts: list[str] = []
    token = _doubts.set(doubts)
    try:
        yield doubts
    finally:
        _doubts.reset(token)
