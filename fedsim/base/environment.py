"""Environment variables that are set for a while, here and in processes that are started meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(variables: Mapping[str, str], *, override: bool = True) -> Iterator[set[str]]:
    """Set environment variables for the block, and give each the value that it had.

    Args:
        override: set also those that have a value already.

    Yields:
        The names of those that are set.
    """
    chosen = {name: value for name, value in variables.items() if override or name not in os.environ}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield set(chosen)
    finally:
        set_variables(before)


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set environment variables, and remove those whose value is None."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
