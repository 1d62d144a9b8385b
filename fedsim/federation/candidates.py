"""Draw candidate records, half of them a client's training records, for membership inference.

Only the evaluator knows which half. Further records, drawn likewise, can be granted with this
knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.randomness import numpy_generator
from fedsim.base.task import are_classes
from fedsim.data import Examples
from fedsim.data.partitions import Indices
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.overlap import hash_records_at
from fedsim.interfaces.knowledge import HELD_OUT, NON_MEMBER_SOURCES


@dataclass(frozen=True, kw_only=True)
class CandidateRecords:
    """Candidate records in random order.

    Attributes:
        inputs: `candidate ...`, in the data set's value range.
        labels: `candidate`.
        members: `candidate`, whether each is a training record of the client.
    """

    inputs: Tensor
    labels: Tensor
    members: Tensor

    @property
    def digest(self) -> str:
        """Hash of all candidates and of which are members."""
        tensors = (self.inputs, self.labels, self.members)
        return sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def draw_candidates(
    data: FederatedData, clients: Sequence[int], others: str, most: int, known: int = 0
) -> CandidateRecords:
    """Draw at most `most` candidates by the seed; repeated calls give the same.

    Each member is paired with a non-member of the same class, so that classes, which differ from
    client to client, reveal nothing; members without such a partner are left out. In a regression
    they are paired at random. No two candidates are equal, and no non-member equals a record of
    these clients. `most` may also be the number of candidates that an earlier call returned.

    Args:
        clients: ids of the clients whose training records the members are.
        others: source of the non-members, one of `fedsim.interfaces.knowledge.NON_MEMBER_SOURCES`.
        known: number of records that `draw_known_candidates` takes from the same pairs; where there
            are not so many, none are set aside.
    """
    pairs = _PairedRecords.draw(data, clients, others)
    free_pairs = pairs.indices.shape[1] - known // 2
    count = min(most // 2, free_pairs) if free_pairs > 0 else most // 2
    return pairs.shuffle(slice(count))


def draw_foreign_candidates(
    held: Examples, other_examples: Examples, clients: Sequence[int], others: str, most: int
) -> CandidateRecords:
    """Draw likewise where there is no experiment: members from `held`, non-members from `other_examples`."""
    indices = np.arange(len(held)), np.arange(len(other_examples))
    rng = numpy_generator(0, "candidates", others, *clients)
    pairs = _PairedRecords.pair(held, indices[0], other_examples, indices[1], rng)
    if not pairs.indices.shape[1]:
        raise DataError(
            f"adversary.knowledge.candidates: the truth files have no record of '{others}' of a class that client "
            f"{clients[0]} holds, which is not one of its own; name a file with more, or attack another victim"
        )
    return pairs.shuffle(slice(most // 2))


def draw_known_candidates(data: FederatedData, clients: Sequence[int], others: str, count: int) -> CandidateRecords:
    """Draw `count` records, an even number, like those of `draw_candidates` and disjoint from them."""
    pairs = _PairedRecords.draw(data, clients, others)
    # Shuffled like the candidates, known records would reveal which of these are members.
    pairs = replace(pairs, rng=numpy_generator(data.seed, "known-candidates", others, *clients))
    num_pairs = pairs.indices.shape[1]
    if count // 2 >= num_pairs:
        raise DataError(
            f"adversary.knowledge.known_candidates: client {clients[0]} has {num_pairs} records with partners from "
            f"'{others}', so {count} known ones leave no candidate; grant fewer, or attack a victim that holds more"
        )
    return pairs.shuffle(slice(num_pairs - count // 2, None))


@dataclass(frozen=True, eq=False, kw_only=True)
class _PairedRecords:
    """All pairs of a member and a non-member, in random order.

    Attributes:
        train: examples of the members.
        examples: examples of the non-members.
        indices: `2 pair`, of members in `train` and of non-members in `examples`.
        rng: shuffles the records of pairs.
    """

    train: Examples
    examples: Examples
    indices: Indices
    rng: np.random.Generator

    @classmethod
    def draw(cls, data: FederatedData, clients: Sequence[int], others: str) -> _PairedRecords:
        """Draw all pairs, see `draw_candidates`."""
        train = data.dataset.train
        member_indices = np.unique(np.concatenate([data.indices(client)[0] for client in clients]))
        # Find the source of non-members.
        if others == HELD_OUT:
            examples, other_indices = data.untrained_examples()
        else:
            examples, other_indices = train, _other_clients_indices(data, clients)
        if examples is train:
            other_indices = np.setdiff1d(other_indices, member_indices)
        rng = numpy_generator(data.seed, "candidates", others, *clients)
        pairs = cls.pair(train, member_indices, examples, other_indices, rng)
        if not pairs.indices.shape[1]:
            raise DataError(
                f"adversary.knowledge.candidates: '{others}' has no record of a class that client "
                f"{clients[0]} holds; choose {_suggest_remedy(data, others)}"
            )
        return pairs

    @classmethod
    def pair(
        cls,
        train: Examples,
        member_indices: Indices,
        examples: Examples,
        other_indices: Indices,
        rng: np.random.Generator,
    ) -> _PairedRecords:
        """Pair records by class, shuffle the pairs, and drop duplicates."""
        pairs = _pair_by_class(train, rng.permutation(member_indices), examples, rng.permutation(other_indices))
        pairs = pairs[:, rng.permutation(pairs.shape[1])]
        pairs = pairs[:, _find_distinct(train, member_indices, examples, pairs)]
        return cls(train=train, examples=examples, indices=pairs, rng=rng)

    def shuffle(self, which: slice) -> CandidateRecords:
        """Return the records of these pairs, in random order."""
        members, others = (torch.from_numpy(index) for index in self.indices[:, which])
        count = len(members)
        order = self.rng.permutation(2 * count)
        return CandidateRecords(
            inputs=torch.cat([self.train.inputs(members), self.examples.inputs(others)])[order],
            labels=torch.cat([self.train.labels[members], self.examples.labels[others]])[order],
            members=(torch.arange(2 * count) < count)[order],
        )


def _suggest_remedy(data: FederatedData, others: str) -> str:
    """Name a remedy where the source `others` has no record."""
    if data.clients > 1:
        [other_source] = set(NON_MEMBER_SOURCES) - {others}
        return f"'{other_source}' or another victim"
    return "data with test examples" if others == HELD_OUT else f"'{HELD_OUT}'"


def _find_distinct(train: Examples, member_indices: Indices, examples: Examples, pairs: Indices) -> list[bool]:
    """Return for each pair whether both records are new and the non-member is no client record."""
    client_records, seen = set(hash_records_at(train, member_indices)), set[bytes]()
    is_distinct: list[bool] = []
    for member, other in zip(hash_records_at(train, pairs[0]), hash_records_at(examples, pairs[1]), strict=True):
        is_distinct.append(other not in client_records and seen.isdisjoint((member, other)))
        seen.update((member, other))
    return is_distinct


def _other_clients_indices(data: FederatedData, clients: Sequence[int]) -> Indices:
    indices = [data.indices(client)[0] for client in range(data.clients) if client not in clients]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *indices]))


def _pair_by_class(train: Examples, member_indices: Indices, examples: Examples, other_indices: Indices) -> Indices:
    """Pair members in `train` with non-members in `examples` of the same class, `2 pair`."""
    if not are_classes(train.labels):
        count = min(len(member_indices), len(other_indices))
        return np.stack([member_indices[:count], other_indices[:count]])
    pairs = [np.empty((2, 0), dtype=np.int64)]
    member_labels = train.labels.numpy()[member_indices]
    other_labels = examples.labels.numpy()[other_indices]
    for label in np.unique(member_labels):
        members, others = (
            member_indices[member_labels == label],
            other_indices[other_labels == label],
        )
        count = min(len(members), len(others))
        pairs.append(np.stack([members[:count], others[:count]]))
    return np.concatenate(pairs, axis=1)
