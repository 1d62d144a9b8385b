"""Records that are equal: what an adversary is granted beside the clients' records must be none of these again."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Examples
from fedsim.experiments.federated_data import FederatedData
from fedsim.partitions import Indices

_AT_ONCE = 1000
"""Records that are in memory at once."""


def contents(examples: Examples, places: Indices) -> Iterator[bytes]:
    """Of each record a hash of inputs and label, which is the same for records that are equal."""
    for some in np.array_split(places, max(1, len(places) // _AT_ONCE)):
        index = torch.from_numpy(some)
        yield from hashes(examples.inputs(index), examples.labels[index])


def hashes(inputs: Tensor, labels: Tensor) -> Iterator[bytes]:
    """The same of records that are in tensors, `record ...` and `record`."""
    for record, label in zip(inputs.numpy(), labels.numpy(), strict=True):
        yield sha256(record.tobytes() + label.tobytes()).digest()


def without_twins(data: FederatedData, examples: Examples, places: Indices) -> Iterator[int]:
    """Those of `places` whose record is equal to none that a client trains on."""
    own = np.unique(np.concatenate([data.indices(client)[0] for client in range(data.clients)]))
    held = set(contents(data.dataset.train, own))
    return (int(place) for place, record in zip(places, contents(examples, places), strict=True) if record not in held)
