"""Candidate records: who they are of, that classes tell nothing, and that the evaluator finds the same again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.datasets import Dataset, Examples
from fedsim.errors import DataError
from fedsim.experiments.candidates import drawn
from fedsim.experiments.federated_data import FederatedData
from fedsim.knowledge import HELD_OUT, OTHER_CLIENTS
from fedsim.partitions import Indices

SHARES = ([0, 1, 2, 3, 4, 5, 6, 7, 20], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19])
"""Of clients 0 to 2, places among 21 training examples, each of which holds its own number."""


class Fixed:
    """Shares that are written down."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        return [np.array(share) for share in SHARES[:clients]]


def federated(
    labels: torch.Tensor, *, clients: int = 3, seed: int = 0, tests: int = 12, share: float = 0.0
) -> FederatedData:
    def examples(start: int, own: torch.Tensor) -> Examples:
        numbers = torch.arange(start, start + len(own)).float()[:, None]
        return Examples(raw=numbers, labels=own, scale=1.0)

    dataset = Dataset(
        name="numbers",
        train=examples(0, labels),
        test=examples(100, labels[:tests]),
        num_classes=0 if labels.is_floating_point() else 3,
        source="here",
        licence="none",
    )
    return FederatedData(
        dataset=dataset, partition=Fixed(), clients=clients, seed=seed, test_fraction=share, standardise=False
    )


CLASSES = torch.arange(21) % 3


@pytest.mark.parametrize(
    ("others", "sources"), [(HELD_OUT, range(100, 112)), (OTHER_CLIENTS, [*SHARES[1], *SHARES[2]])]
)
def test_half_are_of_the_victim_and_half_from_where_it_says(others: str, sources: list[int]) -> None:
    found = drawn(federated(CLASSES), [0], others, 1000)
    numbers = found.inputs.squeeze(1).int()
    assert int(found.members.sum()) * 2 == len(found.members) == len(numbers.unique()) > 10
    assert set(numbers[found.members].tolist()) <= set(SHARES[0])
    assert set(numbers[~found.members].tolist()) <= set(sources)
    truly = torch.where(numbers < 100, numbers % 3, (numbers - 100) % 3)
    assert torch.equal(found.labels, truly.long())


@pytest.mark.parametrize("others", [HELD_OUT, OTHER_CLIENTS])
def test_classes_are_as_frequent_among_members_as_among_the_others(others: str) -> None:
    labels = CLASSES.clone()
    labels[:8] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    found = drawn(federated(labels), [0], others, 1000)
    counts = [found.labels[where].bincount(minlength=3) for where in (found.members, ~found.members)]
    assert torch.equal(*counts)


def test_who_knows_their_number_draws_the_same_again_and_another_seed_others() -> None:
    data = federated(CLASSES)
    first = drawn(data, [0], HELD_OUT, 1000)
    for count in (1000, len(first.labels)):
        again = drawn(data, [0], HELD_OUT, count)
        assert torch.equal(again.inputs, first.inputs)
        assert torch.equal(again.members, first.members)
    assert not torch.equal(drawn(federated(CLASSES, seed=1), [0], HELD_OUT, 1000).inputs, first.inputs)


def test_there_are_no_more_than_asked_for() -> None:
    found = drawn(federated(CLASSES), [0], HELD_OUT, 7)
    assert (len(found.labels), int(found.members.sum())) == (6, 3)


def test_members_and_others_are_mixed() -> None:
    first = [bool(drawn(federated(CLASSES, seed=seed), [0], HELD_OUT, 1000).members[0]) for seed in range(30)]
    assert 3 < sum(first) < 27


def test_of_a_regression_they_are_paired_at_random() -> None:
    found = drawn(federated(torch.rand(21)), [0], HELD_OUT, 1000)
    assert int(found.members.sum()) == len(SHARES[0])


def test_without_test_examples_what_clients_hold_out_takes_their_place() -> None:
    data = federated(CLASSES, tests=0, share=0.5)
    held_out = {int(place) for client in range(3) for place in data.indices(client)[1]}
    found = drawn(data, [0], HELD_OUT, 1000)
    assert set(found.inputs[~found.members].squeeze(1).int().tolist()) <= held_out


def test_a_victim_whose_classes_nobody_else_has_is_refused() -> None:
    labels = torch.where(torch.isin(torch.arange(21), torch.tensor(SHARES[0])), 2, CLASSES % 2)
    with pytest.raises(
        DataError, match="'other-clients' has no record of a class that client 0 holds; choose 'held-out'"
    ):
        drawn(federated(labels), [0], OTHER_CLIENTS, 1000)
