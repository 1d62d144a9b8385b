"""Find equal records: what is granted or tested on must not equal clients' training records."""

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
_MOST_TESTED = 200
"""Most test examples that are looked for among those that clients train on."""
_LEAST_SHARE, _LEAST_SHARE_OF_ROWS = 0.1, 0.5
"""Share of test examples, and of rows of a table or texts, from which on it is said that clients train on them."""
_FEW_VALUES = 32
"""Most values of a record by which it is looked for."""


def hash_records_at(examples: Examples, indices: Indices) -> Iterator[bytes]:
    """Yield a hash of the input and label of each record, equal for equal records."""
    for chunk in np.array_split(indices, max(1, len(indices) // _CHUNK_SIZE)):
        index = torch.from_numpy(chunk)
        yield from hash_records(examples.inputs(index), examples.labels[index])


def hash_records(inputs: Tensor, labels: Tensor) -> Iterator[bytes]:
    """Yield the same hash for records in tensors, `record ...` and `record`."""
    for record, label in zip(inputs.numpy(), labels.numpy(), strict=True):
        yield sha256(record.tobytes() + label.tobytes()).digest()


def are_many_equal(equal: int, tested: int, ndim: int) -> bool:
    """Return whether more test examples are trained on than by chance, by which rows of a table are often equal.

    Args:
        equal: examples that are trained on.
        tested: examples that are tested on.
        ndim: dimensions of a batch of them.
    """
    return equal > 0 and equal >= (_LEAST_SHARE if ndim > 2 else _LEAST_SHARE_OF_ROWS) * tested


def exclude_training_records(data: FederatedData, examples: Examples, indices: Indices) -> Iterator[int]:
    """Yield those of `indices` whose record equals no record that a client trains on, images whatever their label."""
    train_indices = np.unique(np.concatenate([data.indices(client)[0] for client in range(data.clients)]))
    hash_at = _hash_inputs if examples.raw.ndim > 2 else hash_records_at
    train_hashes = set(hash_at(data.dataset.train, train_indices))
    pairs = zip(indices, hash_at(examples, indices), strict=True)
    return (int(index) for index, record in pairs if record not in train_hashes)


def describe_tested_records(data: FederatedData) -> str:
    """Say that test examples are equal to training examples of clients; empty where few of them are.

    A model that memorises is as accurate on these as one that learns, and who tells members from others by them tells
    nothing. Some of `_MOST_TESTED` examples are looked at.
    """
    test, train = data.dataset.test, data.dataset.train
    tested = np.unique(np.linspace(0, len(test) - 1, min(len(test), _MOST_TESTED)).astype(np.int64))
    trained = np.unique(np.concatenate([data.indices(client)[0] for client in range(data.clients)]))
    # Compare a few values of each record first: hashes of all would need all inputs.
    if test.raw.dtype == train.raw.dtype and test.scale == train.scale:
        wanted = set(_read_few_values(test, tested))
        keys = _read_few_values(train, trained)
        trained = trained[[index for index, key in enumerate(keys) if key in wanted]]
    hashes = set(_hash_inputs(train, trained)) if len(trained) else set()
    equal = sum(record in hashes for record in _hash_inputs(test, tested))
    if not are_many_equal(equal, len(tested), test.raw.ndim):
        return ""
    return (
        f"{equal} of {len(tested)} examined test examples are equal to training examples of clients, so accuracy "
        "measures memory, and members are hard to distinguish from non-members; test on other examples"
    )


def _read_few_values(examples: Examples, indices: Indices) -> list[bytes]:
    """Return as bytes a few values of each record as stored, from all over it."""
    raw = examples.raw.reshape(len(examples), -1)
    positions = np.unique(np.linspace(0, raw.shape[1] - 1, _FEW_VALUES).astype(np.int64))
    rows = raw[torch.from_numpy(indices)[:, None], torch.from_numpy(positions)]
    return [row.tobytes() for row in rows.numpy()]


def _hash_inputs(examples: Examples, indices: Indices) -> Iterator[bytes]:
    """Yield a hash of the input of each record, whatever its label."""
    for chunk in np.array_split(indices, max(1, len(indices) // _CHUNK_SIZE)):
        yield from hash_records(examples.inputs(torch.from_numpy(chunk)), torch.zeros(len(chunk)))
