"""Draw auxiliary records: labelled records like the clients', on which no client trains."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.randomness import numpy_generator
from fedsim.data import Examples
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.overlap import exclude_training_records
from fedsim.interfaces.knowledge import Records


def auxiliary_records(data: FederatedData, most: int) -> Records:
    """Draw at most `most` of the examples that no client trains on, by the seed, in model units."""
    examples, chosen = draw_auxiliary(data, most, "auxiliary")
    return Records(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen])


def draw_auxiliary(data: FederatedData, most: int, fact: str) -> tuple[Examples, Tensor]:
    """Draw such records as indices into examples, for the key `fact` of [adversary.knowledge].

    Guesses, which set the floor, are not made of them where there are others. None of them equals a
    record that a client trains on, which it would reveal.
    """
    examples, index = data.auxiliary_examples()
    name = data.dataset.name
    if not len(index):
        raise DataError(
            f"adversary.knowledge.{fact}: clients train on all examples of '{name}'; hold some out "
            "with partition.test_fraction"
        )
    for pool, numbers in ((examples, index), data.untrained_examples()):
        order = numpy_generator(data.seed, "auxiliary").permutation(numbers)
        if chosen := list(islice(exclude_training_records(data, pool, order), most)):
            return pool, torch.tensor(chosen)
    raise DataError(
        f"adversary.knowledge.{fact}: each of the {len(numbers)} examples of '{name}' that are held out is equal to "
        "one that a client trains on; hold out others"
    )
