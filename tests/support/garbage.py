"""Garbage collection in tests: what exists before a module of tests is left out of it."""

from __future__ import annotations

import gc

count_frozen_objects = gc.get_freeze_count


def freeze_existing_objects() -> None:
    """Leave tests, libraries and what earlier modules made out of garbage collection: they are many and stay.

    Each federation asks whether its host has frozen objects. Python answers by counting them all,
    which takes a tenth of a second here, so the answer is given in advance.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # type: ignore[assignment]
