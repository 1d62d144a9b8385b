"""Candidate records: half of them are training records of a client, and only the evaluator knows which half.

Of further ones, drawn likewise, the adversary can be told which half it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Examples
from fedsim.errors import DataError
from fedsim.experiments.federated_data import FederatedData
from fedsim.experiments.twins import contents
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


def drawn(data: FederatedData, clients: Sequence[int], others: str, most: int, known: int = 0) -> Candidates:
    """At most `most` candidates, drawn by the seed: the same each time, also when `most` is what an earlier call gave.

    Each member stands beside one other of the same class, so that classes, which differ from client to client, tell
    nothing. Members for which there is no such record are left out. Of a regression they are paired at random. No
    candidate is equal to another one, and none of the others to a record of these clients.

    Args:
        clients: whose training records the members are.
        others: where the others are from, one of `fedsim.knowledge.OTHERS`.
        known: how many records `known_drawn` takes, which are no candidates; where it could not take them, they are
            not missed.

    Raises:
        DataError: there is not one such pair.
    """
    drawing = _Drawing.of(data, clients, others)
    left = drawing.pairs.shape[1] - known // 2
    return drawing.mixed(slice(min(most // 2, left) if left > 0 else most // 2))


def known_drawn(data: FederatedData, clients: Sequence[int], others: str, count: int) -> Candidates:
    """`count` records like those that `drawn` gives, and none of them; `count` is even.

    Raises:
        DataError: there are not so many, or none would be left to be candidates.
    """
    drawing = _Drawing.of(data, clients, others)
    # Mixed as the candidates are, known records would say which of these are members.
    drawing = replace(drawing, rng=numpy_generator(data.seed, "known-candidates", others, *clients))
    pairs = drawing.pairs.shape[1]
    if count // 2 >= pairs:
        raise DataError(
            f"adversary.knowledge.known_candidates: client {clients[0]} has {pairs} records with others of "
            f"'{others}' beside, so that {count} known ones leave no candidate; grant fewer, or attack a victim that "
            "holds more"
        )
    return drawing.mixed(slice(pairs - count // 2, None))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Drawing:
    """All pairs that there are, in random order.

    Attributes:
        train: where the members are.
        examples: where the others are.
        pairs: `2 pair`, places of members in `train` and of others in `examples`.
        rng: what mixes them.
    """

    train: Examples
    examples: Examples
    pairs: Indices
    rng: np.random.Generator

    @classmethod
    def of(cls, data: FederatedData, clients: Sequence[int], others: str) -> _Drawing:
        """See `drawn`."""
        train = data.dataset.train
        own = np.unique(np.concatenate([data.indices(client)[0] for client in clients]))
        examples, outside = data.held_out() if others == HELD_OUT else (train, _of_other_clients(data, clients))
        if examples is train:
            outside = np.setdiff1d(outside, own)
        rng = numpy_generator(data.seed, "candidates", others, *clients)
        pairs = _pairs(train, rng.permutation(own), examples, rng.permutation(outside))
        pairs = pairs[:, rng.permutation(pairs.shape[1])]
        pairs = pairs[:, _distinct(train, own, examples, pairs)]
        if not pairs.shape[1]:
            raise DataError(
                f"adversary.knowledge.candidates: '{others}' has no record of a class that client {clients[0]} holds; "
                f"choose {_instead(data, others)}"
            )
        return cls(train=train, examples=examples, pairs=pairs, rng=rng)

    def mixed(self, which: slice) -> Candidates:
        """The records of these pairs, in random order."""
        held, beside = (torch.from_numpy(index) for index in self.pairs[:, which])
        count = len(held)
        order = self.rng.permutation(2 * count)
        return Candidates(
            inputs=torch.cat([self.train.inputs(held), self.examples.inputs(beside)])[order],
            labels=torch.cat([self.train.labels[held], self.examples.labels[beside]])[order],
            members=(torch.arange(2 * count) < count)[order],
        )


def _instead(data: FederatedData, others: str) -> str:
    """What helps where `others` has none."""
    if data.clients > 1:
        [instead] = set(OTHERS) - {others}
        return f"'{instead}' or another victim"
    return "data with test examples" if others == HELD_OUT else f"'{HELD_OUT}'"


def _distinct(train: Examples, own: Indices, examples: Examples, pairs: Indices) -> list[bool]:
    """`pair`, whether both of its records are new and the other is none of the clients' own records."""
    held, seen, new = set(contents(train, own)), set[bytes](), []
    for member, other in zip(contents(train, pairs[0]), contents(examples, pairs[1]), strict=True):
        new.append(other not in held and seen.isdisjoint((member, other)))
        seen.update((member, other))
    return new


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
