"""Auxiliary records: of the same kind as the clients', labelled, and nobody trains on them."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from fedsim.datasets import Examples
from fedsim.errors import DataError
from fedsim.experiments.federated_data import FederatedData
from fedsim.experiments.twins import without_twins
from fedsim.knowledge import Records
from fedsim.randomness import numpy_generator


def auxiliary_records(data: FederatedData, most: int) -> Records:
    """At most `most` of the examples that nobody trains on, drawn by the seed, in model units.

    Raises:
        DataError: clients train on all there is, or on records that are equal to the others.
    """
    examples, chosen = drawn(data, most, "auxiliary")
    return Records(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen])


def drawn(data: FederatedData, most: int, fact: str) -> tuple[Examples, Tensor]:
    """Examples, and the places among them of those records, for the key `fact` of [adversary.knowledge].

    None of them is equal to a record that a client trains on, which would give that one away.
    """
    examples, index = data.held_out()
    name = data.dataset.name
    if not len(index):
        raise DataError(
            f"adversary.knowledge.{fact}: clients train on all examples of '{name}'; hold some out with "
            "partition.test_fraction"
        )
    order = numpy_generator(data.seed, "auxiliary").permutation(index)
    chosen = list(islice(without_twins(data, examples, order), most))
    if not chosen:
        raise DataError(
            f"adversary.knowledge.{fact}: each of the {len(index)} examples of '{name}' that are held out is equal to "
            "one that a client trains on; hold out others"
        )
    return examples, torch.tensor(chosen)
