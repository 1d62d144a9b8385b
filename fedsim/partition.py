"""Who holds which examples. A partition is a frozen dataclass with an `assign` method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import ConfigError

Indices = NDArray[np.int64]


class Partition(Protocol):
    """Splits a training set among clients."""

    def assign(self, labels: NDArray[np.int64], clients: int, rng: np.random.Generator) -> list[Indices]:
        """One index array a client; together they cover each example at most once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Equal shares in random order."""

    def assign(self, labels: NDArray[np.int64], clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`."""
        return list(np.array_split(rng.permutation(len(labels)), clients))


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Each class is shared out in proportions drawn from Dirichlet(alpha) over the clients.

    Args:
        alpha: concentration; small values give each client few classes, large ones approach IID.
        min_examples: draw again until every client holds at least this many.
    """

    alpha: float = 0.5
    min_examples: int = 2

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"alpha: expected a finite value above 0, got {self.alpha}")

    def assign(self, labels: NDArray[np.int64], clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`.

        Raises:
            ConfigError: 100 draws left some client short; alpha is too small for so many clients.
        """
        for _ in range(100):
            shares: list[list[Indices]] = [[] for _ in range(clients)]
            for label in np.unique(labels):
                members = rng.permutation(np.flatnonzero(labels == label))
                cuts = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))[:-1] * len(members)
                for share, part in zip(shares, np.split(members, cuts.astype(int)), strict=True):
                    share.append(part)
            assigned = [rng.permutation(np.concatenate(share)) for share in shares]
            if min(map(len, assigned)) >= self.min_examples:
                return assigned
        raise ConfigError(
            f"partition: 100 draws of dirichlet(alpha = {self.alpha}) left one of {clients} clients with fewer than "
            f"{self.min_examples} of {len(labels)} examples; raise alpha, or lower min_examples or federation.clients"
        )


PARTITIONS: dict[str, type[Iid] | type[Dirichlet]] = {"iid": Iid, "dirichlet": Dirichlet}
