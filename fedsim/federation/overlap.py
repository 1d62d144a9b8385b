"""Find equal records: records granted to an adversary must not equal clients' training records."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from fedsim.data import Examples
from fedsim.data.partitions import Indices
from fedsim.federation.federated_data import FederatedData

_CHUNK_SIZE = 1000
"""Most records that are in memory at once."""


def hash_records_at(examples: Examples, indices: Indices) -> Iterator[bytes]:
    """Yield a hash of the input and label of each record, equal for equal records."""
    for chunk in np.array_split(indices, max(1, len(indices) // _CHUNK_SIZE)):
        index = torch.from_numpy(chunk)
        yield from hash_records(examples.inputs(index), examples.labels[index])


def hash_records(inputs: Tensor, labels: Tensor) -> Iterator[bytes]:
    """Yield the same hash for records in tensors, `record ...` and `record`."""
    for record, label in zip(inputs.numpy(), labels.numpy(), strict=True):
        yield sha256(record.tobytes() + label.tobytes()).digest()


def exclude_training_records(data: FederatedData, examples: Examples, indices: Indices) -> Iterator[int]:
    """Yield those of `indices` whose record equals no record that a client trains on."""
    train_indices = np.unique(np.concatenate([data.indices(client)[0] for client in range(data.clients)]))
    train_hashes = set(hash_records_at(data.dataset.train, train_indices))
    pairs = zip(indices, hash_records_at(examples, indices), strict=True)
    return (int(index) for index, record in pairs if record not in train_hashes)
