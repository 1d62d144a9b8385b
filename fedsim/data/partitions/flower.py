"""Partitions by Flower Datasets: a few classes a client, and clients of different sizes.

Its partitioners get only a table of labels, in random order, because they take examples as they
come.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveInt
from fedsim.base.environment import environment
from fedsim.base.errors import ConfigError, InstallationError
from fedsim.data import Dataset
from fedsim.data.partitions import Indices
from fedsim.data.partitions.shares import class_labels

log = logging.getLogger(__name__)

_Numbers = NDArray[np.float64]
_QUIET_VARIABLES = ("HF_HUB_DISABLE_TELEMETRY", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_GROWTH_FUNCTIONS: dict[str, Callable[[_Numbers], _Numbers]] = {
    "linear": lambda ids: ids,
    "square": np.square,
    # Only proportions count, and exp(710) is more than a float can hold.
    "exponential": lambda ids: np.exp(ids - ids.max()),
}


@dataclass(frozen=True, kw_only=True)
class Pathological(CheckedSettings):
    """Each client holds examples of a few classes only ([McMahan2017], Sect. 3).

    The shares are drawn by Flower Datasets.

    Args:
        classes_per_client: classes of each client.
        assignment: `first-deterministic`, client i holds class i (modulo their number) and others
            at random, so that every class is held if there are as many clients; `deterministic`,
            classes i, i + 1, and so on; `random`, all at random, which may leave a class to nobody.
    """

    classes_per_client: PositiveInt = 2
    assignment: Literal["first-deterministic", "deterministic", "random"] = "first-deterministic"

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Assign each client a few classes."""
        labels = class_labels(dataset, "pathological")
        classes = np.unique(labels)
        if self.classes_per_client > len(classes):
            raise ConfigError(
                f"partition.classes_per_client: {self.classes_per_client} classes a client, but '{dataset.name}' has "
                f"{len(classes)}; lower it"
            )
        partitioner = _import_partitioners().PathologicalPartitioner(
            clients, "label", self.classes_per_client, self.assignment, seed=int(rng.integers(2**31))
        )
        shares = _run_partitioner(
            partitioner,
            labels,
            clients,
            rng,
            f"some class of '{dataset.name}' has fewer examples than are to hold it of {clients} clients; "
            "lower federation.clients or partition.classes_per_client",
        )
        assigned_classes = np.unique(labels[np.concatenate(shares)])
        if len(assigned_classes) < len(classes):
            missing = ", ".join(map(str, np.setdiff1d(classes, assigned_classes)))
            log.warning("partition: no client holds examples of class %s", missing)
        return shares


@dataclass(frozen=True, kw_only=True)
class QuantitySkew(CheckedSettings):
    """Clients of different sizes: client i has a share in proportion to f(i + 1), at random.

    The shares are drawn by Flower Datasets.

    Args:
        growth: f: `linear` x, `square` x**2, `exponential` exp(x), of which the last client has 63
            %.
        min_examples: examples of each client before the rest is distributed in those proportions; 0
            as in Flower's partitioners of these names. With many clients the first ones then get
            nothing, which is an error: of 60 000 examples beyond 345, 55 and 11 clients.
    """

    growth: Literal["linear", "square", "exponential"] = "linear"
    min_examples: NonNegativeInt = 0

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """Assign each client a share that grows with its index."""
        count = len(dataset.train)
        if clients * self.min_examples >= count:
            raise ConfigError(
                f"partition.min_examples: {clients} clients of at least {self.min_examples} examples leave nothing of "
                f"the {count} of '{dataset.name}' to differ in; lower it or federation.clients"
            )
        # Flower rounds sizes down; the thousandth keeps the minimum whole.
        minimum = (self.min_examples + 0.001) / count if self.min_examples else 0.0

        def compute_fractions(ids: _Numbers) -> _Numbers:
            grown = _GROWTH_FUNCTIONS[self.growth](ids)
            fractions: _Numbers = minimum + (1 - len(ids) * minimum) * grown / grown.sum()
            return fractions

        partitioner = _import_partitioners().IdToSizeFncPartitioner(clients, compute_fractions)
        return _run_partitioner(
            partitioner,
            np.zeros(count, np.int64),
            clients,
            rng,
            f"with {self.growth} growth the first of {clients} clients would get nothing of {count} examples; "
            "set partition.min_examples to 1 or more, or lower federation.clients",
        )


def _run_partitioner(
    partitioner: Any, labels: Indices, clients: int, rng: np.random.Generator, complaint: str
) -> list[Indices]:
    """Return the shares that a partitioner of Flower makes of examples with these labels."""
    import datasets

    order = rng.permutation(len(labels))
    table = datasets.Dataset.from_dict({"label": labels[order]})
    # A partition is `table.select(indices)`, whose copy and hash take 8 ms a client. Only the
    # indices are needed.
    table.select = np.asarray
    partitioner.dataset = table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `assign` itself warns of classes that nobody holds
            return [order[partitioner.load_partition(client)] for client in range(clients)]
    except ValueError as error:
        raise ConfigError(f"partition: {complaint}") from error


def _import_partitioners() -> ModuleType:
    """Import Flower's partitioners.

    They import a library of Hugging Face, which reports its import to a server and draws progress
    bars unless environment variables forbid it at that moment.
    """
    try:
        with environment(dict.fromkeys(_QUIET_VARIABLES, "1"), override=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of its dependencies at import
            return importlib.import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise InstallationError(
            "partition: this one needs flwr-datasets; pip install 'fedsim-curious[federation]'"
        ) from error
