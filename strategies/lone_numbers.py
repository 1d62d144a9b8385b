"""Numbers of a secure sum that a single client moved, which the sum shows as that client sent them.

References:
    [Suimon2025], who hide each number of the sum unless enough clients contribute to it. Here they are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.base.errors import format_percent, join_first

_NOBODY, _SEVERAL = -1, -2
_MAX_NAMED_CLIENTS = 10


class LoneNumbers:
    """Who moved each number of a sum: nobody, one client or several.

    >>> lone = LoneNumbers()
    >>> lone.add(4, [np.array([1.0, 0.0, 2.0])])
    >>> lone.add(7, [np.array([0.0, 0.0, 3.0])])
    >>> lone.describe()[:65]
    'clients 4, 7: 1 of 3 numbers of the sum were moved by one of them'
    """

    def __init__(self) -> None:
        self._movers: list[NDArray[np.int32]] = []
        self._moved: dict[int, int] = {}

    def add(self, client: int, update: Sequence[NDArray[Any]], smallest: float = 0.0) -> None:
        """Count the numbers that the update of `client` moves in the sum.

        Args:
            client: its id, of which each is added once.
            update: arrays, of the same shapes each time.
            smallest: numbers that are not larger are lost when the sum is rounded.
        """
        if not self._movers:
            self._movers = [np.full(values.shape, _NOBODY, dtype=np.int32) for values in update]
        self._moved[client] = 0
        for movers, values in zip(self._movers, update, strict=True):
            is_moved = np.abs(values) > smallest
            movers[...] = np.where(is_moved, np.where(movers == _NOBODY, client, _SEVERAL), movers)
            self._moved[client] += int(is_moved.sum())

    @property
    def count(self) -> int:
        """Return how many numbers a single client moved, where others answered, too."""
        return sum(self._count_by_client().values()) if len(self._moved) > 1 else 0

    def describe(self) -> str:
        """Say how many numbers of the sum are of a single client, and whose update they show most of."""
        lone = self._count_by_client()
        shares = {client: lone[client] / moved for client, moved in self._moved.items() if moved}
        exposed = max(shares, key=lambda client: shares[client])
        size = sum(movers.size for movers in self._movers)
        return (
            f"clients {join_first(sorted(self._moved), _MAX_NAMED_CLIENTS)}: {self.count} of {size} numbers of the sum "
            f"were moved by one of them alone, and are seen as it sent them; of client {exposed} these are "
            f"{format_percent(shares[exposed], '.3g')} of what it moved"
        )

    def _count_by_client(self) -> dict[int, int]:
        counts = dict.fromkeys(self._moved, 0)
        for movers in self._movers:
            for mover, count in zip(*np.unique(movers, return_counts=True), strict=True):
                if mover >= 0:
                    counts[int(mover)] += int(count)
        return counts
