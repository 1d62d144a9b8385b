"""Who holds which examples: the interface of a partition plug-in. One file a family."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsim.datasets import Dataset

Indices = NDArray[np.int64]


class Partition(Protocol):
    """What a registered partition offers: a frozen dataclass whose fields are its settings."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Indices into the training set of `dataset`, one array a client.

        No two clients hold the same example, unless the class sets `overlapping: ClassVar[bool] = True`; no client
        holds one twice. Random numbers are drawn from `rng` alone.
        """
        ...
