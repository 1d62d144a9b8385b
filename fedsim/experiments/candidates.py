"""Candidate records: half of them are training records of a client, and only the evaluator knows which half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Examples
from fedsim.errors import DataError
from fedsim.experiments.federated_data import FederatedData
from fedsim.knowledge import HELD_OUT, OTHERS
from fedsim.partitions import Indices
from fedsim.randomness import numpy_generator


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Records in random order.

    Attributes:
        inputs: `candidate ...`, in the data set's value range.
        labels: `candidate`.
        members: `candidate`, whether it is a training record of the client.
    """

    inputs: Tensor
    labels: Tensor
    members: Tensor


def drawn(data: FederatedData, clients: Sequence[int], others: str, most: int) -> Candidates:
    """At most `most` candidates, drawn by the seed: the same each time, also when `most` is what an earlier call gave.

    Each member stands beside one other of the same class, so that classes, which differ from client to client, tell
    nothing. Members for which there is no such record are left out. Of a regression they are paired at random.

    Args:
        clients: whose training records the members are.
        others: where the others are from, one of `fedsim.knowledge.OTHERS`.

    Raises:
        DataError: there is not one such pair.
    """
    train = data.dataset.train
    own = np.unique(np.concatenate([data.indices(client)[0] for client in clients]))
    examples, outside = data.held_out() if others == HELD_OUT else (train, _of_other_clients(data, clients))
    if examples is train:
        outside = np.setdiff1d(outside, own)
    rng = numpy_generator(data.seed, "candidates", others, *clients)
    pairs = _pairs(train, rng.permutation(own), examples, rng.permutation(outside))
    pairs = pairs[:, rng.permutation(pairs.shape[1])[: most // 2]]
    count = pairs.shape[1]
    if not count:
        [instead] = set(OTHERS) - {others}
        raise DataError(
            f"adversary.knowledge.candidates: '{others}' has no record of a class that client {clients[0]} holds; "
            f"choose '{instead}' or another victim"
        )
    order = rng.permutation(2 * count)
    held, beside = (torch.from_numpy(index) for index in pairs)
    return Candidates(
        inputs=torch.cat([train.inputs(held), examples.inputs(beside)])[order],
        labels=torch.cat([train.labels[held], examples.labels[beside]])[order],
        members=(torch.arange(2 * count) < count)[order],
    )


def _of_other_clients(data: FederatedData, clients: Sequence[int]) -> Indices:
    shares = [data.indices(other)[0] for other in range(data.clients) if other not in clients]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *shares]))


def _pairs(train: Examples, own: Indices, examples: Examples, outside: Indices) -> Indices:
    """`2 pair`: places of members in `train` and of others in `examples`, of one class each, classes one by one."""
    if train.labels.is_floating_point():
        count = min(len(own), len(outside))
        return np.stack([own[:count], outside[:count]])
    found, labels = [np.empty((2, 0), dtype=np.int64)], train.labels.numpy()[own]
    of_others = examples.labels.numpy()[outside]
    for label in np.unique(labels):
        members, others = own[labels == label], outside[of_others == label]
        count = min(len(members), len(others))
        found.append(np.stack([members[:count], others[:count]]))
    return np.concatenate(found, axis=1)
