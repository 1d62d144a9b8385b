"""Auxiliary records: of the same kind as the clients', labelled, and nobody trains on them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.datasets import Examples
from fedsim.errors import DataError
from fedsim.experiments.federated_data import FederatedData
from fedsim.knowledge import Records
from fedsim.randomness import numpy_generator


def auxiliary_records(data: FederatedData, most: int) -> Records:
    """At most `most` of the examples that nobody trains on, drawn by the seed, in model units.

    Raises:
        DataError: clients train on all there is.
    """
    examples, chosen = drawn(data, most, "auxiliary")
    return Records(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen])


def drawn(data: FederatedData, most: int, fact: str) -> tuple[Examples, Tensor]:
    """Examples, and the places among them of those records, for the key `fact` of [adversary.knowledge]."""
    examples, index = data.held_out()
    if not len(index):
        raise DataError(
            f"adversary.knowledge.{fact}: clients train on all examples of '{data.dataset.name}'; hold some out "
            "with partition.test_fraction"
        )
    return examples, torch.from_numpy(numpy_generator(data.seed, "auxiliary").permutation(index)[:most])
