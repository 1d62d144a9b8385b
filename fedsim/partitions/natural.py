"""Clients as they are in the world: a writer, a role, an airline each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError
from fedsim.partitions import Indices


@dataclass(frozen=True, kw_only=True)
class Natural:
    """Each client is one of the data set's natural groups, such as the writer of its digits.

    As many groups as there are clients are drawn without replacement. Where there are just as many,
    client 0 is the first of them, client 1 the second, and so on.

    Args:
        min_examples: leave out groups with fewer training examples.
    """

    min_examples: int = 1

    def __post_init__(self) -> None:
        if self.min_examples < 1:
            raise ConfigError(f"min_examples: expected at least 1, got {self.min_examples}")

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`.

        Raises:
            ConfigError: nobody knows the groups, or there are fewer than clients.
        """
        members = self.members(dataset)
        if clients > len(members):
            least = f" with at least {self.min_examples} examples" if self.min_examples > 1 else ""
            remedy = "; lower federation.clients" + (" or partition.min_examples" if self.min_examples > 1 else "")
            raise ConfigError(
                f"partition: {clients} clients, but '{dataset.name}' has {len(members)} natural groups{least}{remedy}"
            )
        if clients == len(members):
            return members
        return [members[group] for group in rng.choice(len(members), clients, replace=False)]

    def members(self, dataset: Dataset) -> list[Indices]:
        """The examples of each group that is large enough, in the order of the groups.

        Raises:
            ConfigError: nobody knows the groups.
        """
        if dataset.train.groups is None:
            raise ConfigError(f"partition: {_no_groups(dataset.name)}")
        groups = dataset.train.groups.numpy()
        order = np.argsort(groups, kind="stable").astype(np.int64)
        starts = np.flatnonzero(np.diff(groups[order])) + 1
        return [part for part in np.split(order, starts) if len(part) >= self.min_examples]


def _no_groups(name: str) -> str:
    if name == "mnist":
        return (
            "natural needs the writers of 'mnist', which are in the label files of QMNIST; put "
            "qmnist-train-labels-idx2-int.gz into the folder QMNIST/raw of the data folder"
        )
    return (
        f"nobody knows whose the examples of '{name}' are, so it has no natural clients; use iid or dirichlet, or a "
        "data set with writers, roles or owners: handwriting, femnist, flight-prices, leaf, leaf-synthetic or mnist"
    )
