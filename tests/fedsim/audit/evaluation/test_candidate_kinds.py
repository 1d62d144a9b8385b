"""Candidates of different kinds are doubted, and those that differ in membership alone are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.candidate_kinds import BlindRanking, doubt_candidates, rank_blindly
from fedsim.audit.evaluation.doubts import collect_doubts
from fedsim.federation.candidates import CandidateRecords

COUNT = 200


def make_candidates(seed: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> CandidateRecords:
    rng = torch.Generator().manual_seed(seed)
    members = torch.randperm(COUNT, generator=rng) < COUNT // 2
    inputs, labels = change(torch.rand(COUNT, 1, 4, 4, generator=rng), members)
    return CandidateRecords(inputs=inputs, labels=labels, members=members)


def without_difference(inputs: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, torch.zeros(COUNT, dtype=torch.int64)


def brighter(inputs: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    return inputs + 0.2 * members[:, None, None, None], torch.zeros(COUNT, dtype=torch.int64)


def of_higher_contrast(inputs: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    contrast = 1 + 1.0 * members[:, None, None, None]
    return 0.5 + (inputs - 0.5) * contrast, torch.zeros(COUNT, dtype=torch.int64)


def of_higher_targets(inputs: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, inputs.flatten(1).sum(1) + 3 * members


def of_other_words(inputs: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    texts = (9 * inputs.flatten(1)).long()
    return torch.where(members[:, None] & (texts == 0), 9, texts), torch.zeros(COUNT, dtype=torch.int64)


@pytest.mark.parametrize("change", [brighter, of_higher_contrast, of_higher_targets, of_other_words])
def test_members_of_another_kind_are_doubted(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    with collect_doubts() as doubts:
        doubt_candidates(rank_blindly(make_candidates(0, change)), [], "attack, client 0")
    assert "attack, client 0: candidates differ in more than membership" in doubts[0]


def test_the_classifier_is_as_often_right_as_chance_where_candidates_are_alike() -> None:
    rankings = [rank_blindly(make_candidates(seed, without_difference)) for seed in range(40)]
    deviations = torch.tensor([(ranking.area - 0.5) / ranking.deviation for ranking in rankings])
    assert abs(deviations.mean()) < 0.4
    assert 0.7 < deviations.std() < 1.3


def test_classes_that_look_different_do_not_bias_the_classifier() -> None:
    """Of ten members in five classes, a class with more of them in one half has fewer in the other."""
    deviations = []
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        labels, members = torch.arange(20) % 5, torch.arange(20) < 10
        inputs = 5 * torch.nn.functional.one_hot(labels, 5) + torch.rand(20, 5, generator=rng)
        order = torch.randperm(20, generator=rng)
        ranking = rank_blindly(CandidateRecords(inputs=inputs[order], labels=labels[order], members=members[order]))
        deviations.append((ranking.area - 0.5) / ranking.deviation)
    assert abs(sum(deviations) / len(deviations)) < 0.4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_candidates_and_equal_ones_are_not_doubted(count: int) -> None:
    few = CandidateRecords(
        inputs=torch.zeros(count, 3), labels=torch.zeros(count), members=torch.arange(count) % 2 == 0
    )
    ranking = rank_blindly(few)
    assert ranking.area == 0.5
    with collect_doubts() as doubts:
        doubt_candidates(ranking, [ranking], "attack, client 0")
    assert not doubts


def rank_clients(seed: int, brightness: float, shared: bool) -> list[BlindRanking]:
    """Rank eight members and eight others of each of twelve clients, who may have all others in common."""
    rng, rankings = torch.Generator().manual_seed(seed), []
    common = torch.rand(8, 1, 4, 4, generator=rng)
    for _ in range(12):
        others = common if shared else torch.rand(8, 1, 4, 4, generator=rng)
        own = torch.rand(8, 1, 4, 4, generator=rng) + brightness
        order = torch.randperm(16, generator=rng)
        records = CandidateRecords(
            inputs=torch.cat([own, others])[order], labels=torch.zeros(16, dtype=torch.int64), members=order < 8
        )
        rankings.append(rank_blindly(records))
    return rankings


def test_the_few_candidates_of_each_client_are_doubted_together() -> None:
    own, *others = rank_clients(0, brightness=0.3, shared=False)
    for further, is_doubted in (([], False), (others, True)):
        with collect_doubts() as doubts:
            doubt_candidates(own, further, "attack, client 0")
        assert ["the mean over 12 clients" in doubt for doubt in doubts] == [True] * is_doubted


def test_a_client_of_one_kind_is_not_doubted_for_another_client() -> None:
    odd, alike = (rank_blindly(make_candidates(0, change)) for change in (brighter, without_difference))
    with collect_doubts() as doubts:
        doubt_candidates(alike, [odd], "attack, client 0")
    assert not doubts


@pytest.mark.parametrize("shared", [False, True])
def test_clients_of_one_kind_are_not_doubted_together(shared: bool) -> None:
    with collect_doubts() as doubts:
        for seed in range(4, 8):  # if their candidates were all others, the fifth would be doubted
            own, *others = rank_clients(seed, brightness=0.0, shared=shared)
            doubt_candidates(own, others, f"attack, client {seed}")
    assert not doubts
