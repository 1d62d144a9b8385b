"""Scores of label distributions: by hand, beside guesses, and what cannot be judged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.label_distributions import score_distribution
from fedsim.base.errors import AttackError, DataError
from fedsim.interfaces.findings import LabelDistribution

LABELS = torch.tensor([0, 0, 0, 2])


def test_scores_are_those_of_counting_by_hand() -> None:
    distance, cosine = score_distribution(torch.tensor([0.5, 0.0, 0.25, 0.25]), LABELS, None)
    assert distance.value == pytest.approx(0.25)  # a quarter of the examples would have to get another label
    assert distance.floor == pytest.approx(0.5)
    assert cosine.value == pytest.approx((0.75 * 0.5 + 0.25 * 0.25) / math.sqrt(0.625 * 0.375))
    assert cosine.floor == pytest.approx(1 / math.sqrt(4 * 0.625))
    assert {distance.floor_guess, cosine.floor_guess} == {"every class as often"}
    assert (distance.higher_is_better, cosine.higher_is_better) == (False, True)


def test_the_truth_gets_the_ceilings() -> None:
    for score in score_distribution(torch.tensor([0.75, 0.0, 0.25, 0.0]), LABELS, None):
        assert score.value == pytest.approx(score.ceiling, abs=1e-12)


def test_public_shares_are_a_guess_where_there_are_any() -> None:
    public = torch.tensor([0, 0, 0, 0, 2, 2, 1, 0])
    distance, cosine = score_distribution(torch.full((4,), 0.25), LABELS, public)
    assert {distance.floor_guess, cosine.floor_guess} == {"public class frequencies"}
    assert distance.floor == pytest.approx(0.125)
    assert distance.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (torch.tensor([0.5, 1.0]), "targets of a regression, and the attack claims classes"),
        (torch.tensor([0, 4]), "holds a label 4, the attack claims 4 classes"),
    ],
)
def test_a_truth_of_another_kind_is_refused(labels: Tensor, told: str) -> None:
    with pytest.raises(DataError, match=told):
        score_distribution(torch.full((4,), 0.25), labels, None)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        (torch.full((4,), 0.25), "floating point numbers, round by class"),
        (torch.full((2, 4), 1), "floating point numbers, round by class"),
        (torch.full((2, 4), 0.3), "below 0, NaN, or do not sum to 1"),
        (torch.tensor([[1.5, -0.5], [0.5, 0.5]]), "below 0, NaN, or do not sum to 1"),
        (torch.tensor([[math.nan, 0.5], [0.5, 0.5]]), "below 0, NaN, or do not sum to 1"),
        (torch.tensor([[0.5, 0.5]]), r"rounds of torch.int64, shape \(2,\), expected integers of shape \(1,\)"),
    ],
)
def test_claims_without_the_form_of_shares_are_refused(shares: Tensor, told: str) -> None:
    with pytest.raises(AttackError, match=told):
        LabelDistribution(rounds=torch.tensor([1, 2]), shares=shares)


def test_the_claim_is_the_mean_over_rounds_and_survives_being_saved() -> None:
    made = LabelDistribution(rounds=torch.tensor([3, 5]), shares=torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    again = LabelDistribution.from_tensors(made.claim_tensors, {})
    assert again.mean_shares.tolist() == [0.75, 0.25]
    assert again.rounds.tolist() == [3, 5]
