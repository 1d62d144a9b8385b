"""Partitions assign examples to clients; the interface of a plug-in. One file a family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset

Indices = NDArray[np.int64]


class Partition(Protocol):
    """Interface of a partition plug-in: a frozen dataclass whose fields are its settings."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> Sequence[Indices]:
        """Return indices into the training set of `dataset`, one array a client.

        No two clients hold the same example, unless the class sets `overlapping: ClassVar[bool] =
        True`; no client holds one twice. All random numbers are drawn from `rng`.
        """
        ...
