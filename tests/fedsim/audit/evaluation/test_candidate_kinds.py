"""Candidates of different kinds are doubted, and those that differ in membership alone are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.candidate_kinds import doubt_candidates, measure_blind_ranking
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
        doubt_candidates(make_candidates(0, change), "attack, client 0")
    assert "attack, client 0: candidates differ in more than membership" in doubts[0]


def test_the_classifier_is_as_often_right_as_chance_where_candidates_are_alike() -> None:
    deviations = torch.tensor(
        [measure_blind_ranking(make_candidates(seed, without_difference))[1] for seed in range(40)]
    )
    assert abs(deviations.mean()) < 0.4
    assert 0.7 < deviations.std() < 1.3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_candidates_and_equal_ones_are_not_doubted(count: int) -> None:
    few = CandidateRecords(
        inputs=torch.zeros(count, 3), labels=torch.zeros(count), members=torch.arange(count) % 2 == 0
    )
    assert measure_blind_ranking(few) == (0.5, 0.0)
