"""Candidate records: who they are of, that classes tell nothing, and that the evaluator finds the same again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fedsim.base.errors import DataError
from fedsim.data import Dataset, Examples
from fedsim.data.partitions import Indices
from fedsim.federation.candidates import draw_candidates, draw_known_candidates
from fedsim.federation.federated_data import FederatedData
from fedsim.interfaces.knowledge import HELD_OUT, OTHER_CLIENTS

SHARES = ([0, 1, 2, 3, 4, 5, 6, 7, 20], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19])
"""Of clients 0 to 2, places among 21 training examples, each of which holds its own number."""


class Fixed:
    """Shares that are written down."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        return [np.array(share) for share in SHARES[:clients]]


def federated(
    labels: torch.Tensor,
    *,
    clients: int = 3,
    seed: int = 0,
    tests: int = 12,
    share: float = 0.0,
    twins: Mapping[int, int] | None = None,
) -> FederatedData:
    """`twins` are examples that hold the number of another one; test examples hold 100 and more."""

    def examples(start: int, own: torch.Tensor) -> Examples:
        numbers = torch.arange(start, start + len(own)).float()[:, None]
        for place, number in (twins or {}).items():
            numbers[numbers == place] = number
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
    found = draw_candidates(federated(CLASSES), [0], others, 1000)
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
    found = draw_candidates(federated(labels), [0], others, 1000)
    counts = [found.labels[where].bincount(minlength=3) for where in (found.members, ~found.members)]
    assert torch.equal(*counts)


def test_who_knows_their_number_draws_the_same_again_and_another_seed_others() -> None:
    data = federated(CLASSES)
    first = draw_candidates(data, [0], HELD_OUT, 1000)
    for count in (1000, len(first.labels)):
        again = draw_candidates(data, [0], HELD_OUT, count)
        assert torch.equal(again.inputs, first.inputs)
        assert torch.equal(again.members, first.members)
    assert not torch.equal(draw_candidates(federated(CLASSES, seed=1), [0], HELD_OUT, 1000).inputs, first.inputs)


def test_there_are_no_more_than_asked_for() -> None:
    found = draw_candidates(federated(CLASSES), [0], HELD_OUT, 7)
    assert (len(found.labels), int(found.members.sum())) == (6, 3)


def test_members_and_others_are_mixed() -> None:
    first = [bool(draw_candidates(federated(CLASSES, seed=seed), [0], HELD_OUT, 1000).members[0]) for seed in range(30)]
    assert 3 < sum(first) < 27


def test_of_a_regression_they_are_paired_at_random() -> None:
    found = draw_candidates(federated(torch.rand(21)), [0], HELD_OUT, 1000)
    assert int(found.members.sum()) == len(SHARES[0])


def test_without_test_examples_what_clients_hold_out_takes_their_place() -> None:
    data = federated(CLASSES, tests=0, share=0.5)
    held_out = {int(place) for client in range(3) for place in data.indices(client)[1]}
    found = draw_candidates(data, [0], HELD_OUT, 1000)
    assert set(found.inputs[~found.members].squeeze(1).int().tolist()) <= held_out


def test_a_victim_whose_classes_nobody_else_has_is_refused() -> None:
    labels = torch.where(torch.isin(torch.arange(21), torch.tensor(SHARES[0])), 2, CLASSES % 2)
    with pytest.raises(
        DataError, match="'other-clients' has no record of a class that client 0 holds; choose 'held-out'"
    ):
        draw_candidates(federated(labels), [0], OTHER_CLIENTS, 1000)


@pytest.mark.parametrize("others", [HELD_OUT, OTHER_CLIENTS])
def test_known_records_are_like_candidates_and_none_of_them(others: str) -> None:
    data = federated(CLASSES)
    everything = draw_candidates(data, [0], others, 1000)
    found, known = draw_candidates(data, [0], others, 1000, 6), draw_known_candidates(data, [0], others, 6)
    assert (len(known.labels), int(known.members.sum())) == (6, 3)
    assert torch.equal(*(known.labels[where].bincount(minlength=3) for where in (known.members, ~known.members)))
    apart = torch.cat([found.inputs, known.inputs]).squeeze(1)
    assert torch.equal(apart.sort().values, everything.inputs.squeeze(1).sort().values)
    members = torch.cat([found.inputs[found.members], known.inputs[known.members]])
    assert torch.equal(members.sort(0).values, everything.inputs[everything.members].sort(0).values)


def test_in_what_order_known_records_are_does_not_tell_in_what_order_candidates_are() -> None:
    data = federated(CLASSES)
    found, known = draw_candidates(data, [0], HELD_OUT, 8, 8), draw_known_candidates(data, [0], HELD_OUT, 8)
    assert len(found.members) == len(known.members)
    assert not torch.equal(found.members, known.members)


def test_who_knows_the_number_of_candidates_finds_them_without_knowing_of_known_ones() -> None:
    data = federated(CLASSES)
    first = draw_candidates(data, [0], HELD_OUT, 1000, 6)
    again = draw_candidates(data, [0], HELD_OUT, len(first.labels))
    assert torch.equal(again.inputs, first.inputs)
    assert torch.equal(again.members, first.members)


def test_known_records_that_leave_no_candidate_are_refused_and_candidates_are_not() -> None:
    data = federated(CLASSES)
    with pytest.raises(DataError, match=r"client 1 has 6 records .* 12 known ones leave no candidate; grant fewer"):
        draw_known_candidates(data, [1], HELD_OUT, 12)
    assert torch.equal(
        draw_candidates(data, [1], HELD_OUT, 1000, 12).inputs, draw_candidates(data, [1], HELD_OUT, 1000).inputs
    )
    assert len(draw_known_candidates(data, [1], HELD_OUT, 10).labels) == 10
    assert len(draw_candidates(data, [1], HELD_OUT, 1000, 10).labels) == 2


@pytest.mark.parametrize(("others", "twins"), [(HELD_OUT, {100: 0, 101: 1}), (OTHER_CLIENTS, {9: 0, 18: 0, 10: 1})])
def test_what_is_equal_to_a_record_of_the_victim_is_no_other(others: str, twins: dict[int, int]) -> None:
    for seed in range(5):
        found = draw_candidates(federated(CLASSES, twins=twins, seed=seed), [0], others, 1000)
        assert not set(found.inputs[~found.members].squeeze(1).int().tolist()) & set(SHARES[0])
        assert len(found.labels) > 8


def test_a_record_that_the_victim_holds_twice_is_one_candidate() -> None:
    found = draw_candidates(federated(CLASSES, twins={3: 0, 6: 0}), [0], HELD_OUT, 1000)
    numbers = found.inputs.squeeze(1)
    assert len(numbers.unique()) == len(numbers)
    assert 0 in numbers


@pytest.mark.parametrize(
    ("others", "tests", "instead"), [(OTHER_CLIENTS, 12, "'held-out'$"), (HELD_OUT, 0, "data with test examples$")]
)
def test_a_client_that_is_alone_is_told_what_helps(others: str, tests: int, instead: str) -> None:
    with pytest.raises(DataError, match=f"'{others}' has no record of a class that client 0 holds; choose {instead}"):
        draw_candidates(federated(CLASSES, clients=1, tests=tests), [0], others, 1000)
