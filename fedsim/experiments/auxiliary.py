"""Auxiliary records: of the same kind as the clients', labelled, and nobody trains on them."""

from __future__ import annotations

import torch

from fedsim.errors import DataError
from fedsim.experiments.federated_data import FederatedData
from fedsim.knowledge import Records
from fedsim.randomness import numpy_generator


def auxiliary_records(data: FederatedData, most: int) -> Records:
    """At most `most` of the examples that nobody trains on, drawn by the seed, in model units.

    Raises:
        DataError: clients train on all there is.
    """
    examples, index = data.held_out()
    if not len(index):
        raise DataError(
            f"adversary.knowledge.auxiliary: clients train on all examples of '{data.dataset.name}'; hold some out "
            "with partition.test_fraction"
        )
    chosen = torch.from_numpy(numpy_generator(data.seed, "auxiliary").permutation(index)[:most])
    return Records(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen])
