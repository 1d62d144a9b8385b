"""Shares as Flower Datasets draws them: a few classes a client, and sizes that differ.

Only a table of labels goes through its partitioners, in an order drawn beforehand, because they take
examples as they come.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError, InstallationError
from fedsim.partitions import Indices
from fedsim.partitions.shares import class_labels

log = logging.getLogger(__name__)

_Numbers = NDArray[np.float64]
_QUIET = ("HF_HUB_DISABLE_TELEMETRY", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_GROWTH: dict[str, Callable[[_Numbers], _Numbers]] = {
    "linear": lambda ids: ids,
    "square": np.square,
    # Only proportions count, and exp(710) is more than a float can hold.
    "exponential": lambda ids: np.exp(ids - ids.max()),
}


@dataclass(frozen=True, kw_only=True)
class Pathological:
    """Each client holds examples of a few classes only (McMahan et al. 2017, section 3), via Flower Datasets.

    Args:
        classes_per_client: how many.
        assignment: `first-deterministic`, client i holds class i (modulo their number) and others drawn by
            chance, so that every class is held once there are as many clients; `deterministic`,
            classes i, i + 1, and so on; `random`, all by chance, which may leave a class to nobody.
    """

    classes_per_client: int = 2
    assignment: Literal["first-deterministic", "deterministic", "random"] = "first-deterministic"

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            raise ConfigError(f"classes_per_client: expected at least 1, got {self.classes_per_client}")

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`.

        Raises:
            ConfigError: more classes a client than there are, fewer examples of a class than clients that
                are to have some, or a regression.
            InstallationError: flwr-datasets is not installed.
        """
        labels = class_labels(dataset, "pathological")
        classes = np.unique(labels)
        if self.classes_per_client > len(classes):
            raise ConfigError(
                f"partition.classes_per_client: {self.classes_per_client} classes a client, but '{dataset.name}' has "
                f"{len(classes)}; lower it"
            )
        partitioner = _flower().PathologicalPartitioner(
            clients, "label", self.classes_per_client, self.assignment, seed=int(rng.integers(2**31))
        )
        shares = _partitioned(
            partitioner,
            labels,
            clients,
            rng,
            f"some class of '{dataset.name}' has fewer examples than are to hold it of {clients} clients; "
            "lower federation.clients or partition.classes_per_client",
        )
        held = np.unique(labels[np.concatenate(shares)])
        if len(held) < len(classes):
            missing = ", ".join(map(str, np.setdiff1d(classes, held)))
            log.warning("partition: no client holds examples of class %s", missing)
        return shares


@dataclass(frozen=True, kw_only=True)
class QuantitySkew:
    """Shares of different size in random order: client i has its part in proportion to f(i + 1), via Flower Datasets.

    Args:
        growth: f: `linear` x, `square` x**2, `exponential` exp(x), of which the last client has 63 %.
        min_examples: what each client gets before the rest is shared out in those proportions; 0 is
            what Flower's partitioners of these names do. With many clients the first ones get
            nothing that way, which is an error: of 60 000 examples beyond 345, 55 and 11 clients.
    """

    growth: Literal["linear", "square", "exponential"] = "linear"
    min_examples: int = 0

    def __post_init__(self) -> None:
        if self.min_examples < 0:
            raise ConfigError(f"min_examples: expected at least 0, got {self.min_examples}")

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`.

        Raises:
            ConfigError: a client would get nothing, or there is too little for `min_examples` each.
            InstallationError: flwr-datasets is not installed.
        """
        count = len(dataset.train)
        if clients * self.min_examples >= count:
            raise ConfigError(
                f"partition.min_examples: {clients} clients of at least {self.min_examples} examples leave nothing of "
                f"the {count} of '{dataset.name}' to differ in; lower it or federation.clients"
            )
        # The thousandth keeps what is promised through rounding down.
        promised = (self.min_examples + 0.001) / count if self.min_examples else 0.0

        def sizes(ids: _Numbers) -> _Numbers:
            grown = _GROWTH[self.growth](ids)
            fractions: _Numbers = promised + (1 - len(ids) * promised) * grown / grown.sum()
            return fractions

        partitioner = _flower().IdToSizeFncPartitioner(clients, sizes)
        return _partitioned(
            partitioner,
            np.zeros(count, np.int64),
            clients,
            rng,
            f"with {self.growth} growth the first of {clients} clients would get nothing of {count} examples; "
            "set partition.min_examples to 1 or more, or lower federation.clients",
        )


def _partitioned(
    partitioner: Any, labels: Indices, clients: int, rng: np.random.Generator, refusal: str
) -> list[Indices]:
    """What Flower's `partitioner` makes of examples with these labels in random order.

    `refusal` is what to say when it refuses.
    """
    import datasets

    order = rng.permutation(len(labels))
    table = datasets.Dataset.from_dict({"label": labels[order]})
    # A part is `table.select(indices)`, whose copy and hash take 8 ms a client; the indices are all we want.
    table.select = np.asarray
    partitioner.dataset = table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that nobody holds we warn ourselves
            return [order[partitioner.load_partition(client)] for client in range(clients)]
    except ValueError as error:
        raise ConfigError(f"partition: {refusal}") from error


def _flower() -> ModuleType:
    """Flower's partitioners.

    What they are made on asks a hub of data sets nothing, but would tell it that it was imported and draw bars, where
    the environment does not say otherwise at that moment.
    """
    added = {name for name in _QUIET if name not in os.environ}
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its dependencies at import are theirs
            return importlib.import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise InstallationError(
            "partition: this one needs flwr-datasets; pip install 'fedsim-curious[federation]'"
        ) from error
    finally:
        for name in added:
            os.environ.pop(name, None)
