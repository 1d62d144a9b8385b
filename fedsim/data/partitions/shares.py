"""Random partitions: equal shares (IID), and shares that differ in their classes (Dirichlet)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveFloat
from fedsim.base.errors import ConfigError
from fedsim.data import Dataset
from fedsim.data.partitions import Indices


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Equal shares in random order.

    Args:
        distinct_labels: give each client at most one example of each class, so that no two of its
            labels are the same; where a class has fewer examples than there are clients, those
            without one are chosen at random. Combine it with `samples_per_client` to choose how
            many of them a client keeps.
    """

    distinct_labels: bool = False

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> Sequence[Indices]:
        """Assign equal shares in random order."""
        if not self.distinct_labels:
            return EvenShares(rng.permutation(len(dataset.train)), clients)
        labels = class_labels(dataset, "iid with distinct_labels")
        shares: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, member in zip(rng.permutation(clients), members, strict=False):
                shares[client].append(member)
        return [np.array(share, dtype=np.int64) for share in shares]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(CheckedSettings):
    """Each class is distributed over the clients in proportions drawn from Dirichlet(alpha).

    Args:
        alpha: concentration; small values give each client few classes, large ones approach IID.
        min_examples: draw again until every client holds at least this many.
    """

    alpha: PositiveFloat = 0.5
    min_examples: NonNegativeInt = 2

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Draw the proportions of each class until every client has enough examples."""
        labels = class_labels(dataset, "dirichlet")
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


class EvenShares(Sequence[Indices]):
    """Parts of an array as of `np.array_split`, made when they are asked for: a million arrays take 100 MB.

    Args:
        indices: the array, `example`.
        clients: how many parts; the first ones get one more where they cannot be equal.

    >>> [part.tolist() for part in EvenShares(np.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, indices: Indices, clients: int) -> None:
        self._indices, self._clients = indices, clients
        self._size, self._num_larger = divmod(len(indices), clients)

    def __len__(self) -> int:
        return self._clients

    @overload
    def __getitem__(self, index: int) -> Indices: ...

    @overload
    def __getitem__(self, index: slice) -> list[Indices]: ...

    def __getitem__(self, index: int | slice) -> Indices | list[Indices]:
        """Return the part of a client, or of several."""
        if isinstance(index, slice):
            return [self[client] for client in range(*index.indices(self._clients))]
        client = range(self._clients)[index]
        start = client * self._size + min(client, self._num_larger)
        return self._indices[start : start + self._size + (client < self._num_larger)]


def class_labels(dataset: Dataset, partition: str) -> Indices:
    """Return the classes of the training examples, `example`.

    Args:
        partition: the partition that needs them, for errors.
    """
    if not dataset.num_classes:
        raise ConfigError(
            f"partition: {partition} shares out classes, and '{dataset.name}' is {dataset.task.describe_goal()}; "
            "use iid without distinct_labels"
        )
    labels: Indices = dataset.train.labels.numpy()
    return labels
