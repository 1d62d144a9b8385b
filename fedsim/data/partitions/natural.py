"""Natural clients: each is a writer, a role, an airline or another owner of examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.data import Dataset
from fedsim.data.partitions import Indices


@dataclass(frozen=True, kw_only=True)
class Natural(CheckedSettings):
    """Each client is one of the data set's natural groups, such as the writer of its digits.

    As many groups as there are clients are drawn without replacement. Where both numbers are equal,
    client 0 is the first group, client 1 the second, and so on.

    Args:
        min_examples: leave out groups with fewer training examples.
    """

    min_examples: PositiveInt = 1

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Assign one natural group to each client."""
        groups = self.group_members(dataset)
        if clients > len(groups):
            condition, remedy = "", "lower federation.clients"
            if self.min_examples > 1:
                condition = f" with at least {self.min_examples} examples"
                remedy += " or partition.min_examples"
            raise ConfigError(
                f"partition: {clients} clients, but '{dataset.name}' has {len(groups)} natural groups{condition}; "
                f"{remedy}"
            )
        if clients == len(groups):
            return groups
        return [groups[group] for group in rng.choice(len(groups), clients, replace=False)]

    def group_members(self, dataset: Dataset) -> list[Indices]:
        """Return the examples of each group that is large enough, in the order of the groups."""
        if dataset.train.groups is None:
            raise ConfigError(f"partition: {_explain_missing_groups(dataset.name)}")
        groups = dataset.train.groups.numpy()
        order = np.argsort(groups, kind="stable").astype(np.int64)
        starts = np.flatnonzero(np.diff(groups[order])) + 1
        return [members for members in np.split(order, starts) if len(members) >= self.min_examples]


def _explain_missing_groups(name: str) -> str:
    if name == "mnist":
        return (
            "natural needs the writers of 'mnist', which are in the label files of QMNIST; put "
            "qmnist-train-labels-idx2-int.gz into the folder QMNIST/raw of the data folder"
        )
    return (
        f"the owners of the examples of '{name}' are unknown, so it has no natural clients; use iid or dirichlet, or a "
        "data set with writers, roles or owners: handwriting, femnist, flight-prices, leaf, leaf-synthetic or mnist"
    )
