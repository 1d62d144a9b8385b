"""Garbage collection during a federation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def little_garbage() -> Iterator[Callable[[], None]]:
    """Bulyan and QFedAvg collect garbage once an array; leave out of that what was there before.

    Gives a function that leaves out what is there by now, too. Where the host program has frozen objects, nothing is
    done: they could not be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield lambda: None
        return

    def settle() -> None:
        gc.collect()
        gc.freeze()

    gc.freeze()
    try:
        yield settle
    finally:
        gc.unfreeze()
