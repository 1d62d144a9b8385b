"""Scores of membership: against counting by hand, at chance, with ties, and with too few candidates."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedsim.audit.evaluation.memberships import compute_roc, score_membership
from fedsim.base.errors import AttackError, DataError
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import Membership


def scored(scores: Tensor, held: Tensor) -> dict[str, float]:
    return {score.metric: score.value for score in score_membership(scores, held)}


def drawn(count: int, shift: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = generator("scores", seed)
    held = torch.arange(count) % 2 == 0
    return torch.randn(count, generator=rng) + shift * held, held


def test_scores_are_those_of_counting_by_hand() -> None:
    scores, held = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    found = scored(scores, held)
    assert found["membership_auc"] == pytest.approx(8 / 9)  # of nine pairs one is in the wrong order
    assert found["membership_accuracy"] == pytest.approx(2 / 3)  # the upper three: two members, one other
    assert math.isnan(found["tpr_at_1_in_100"])


def test_the_area_is_that_of_an_independent_implementation() -> None:
    scores, held = drawn(400, 0.7)
    pairs_in_order = mannwhitneyu(scores[held], scores[~held]).statistic
    assert scored(scores, held)["membership_auc"] == pytest.approx(pairs_in_order / 200**2)


def test_a_perfect_attack_gets_one_and_the_opposite_none() -> None:
    held = torch.arange(2000) < 1000
    assert set(scored(held.float(), held).values()) == {1.0}
    assert set(scored(-held.float(), held).values()) == {0.0}


def test_infinite_scores_are_the_highest() -> None:
    held = torch.tensor([True, True, False, False])
    assert scored(torch.tensor([math.inf, 3.0, 2.0, -math.inf]), held)["membership_auc"] == 1


def test_saying_the_same_of_all_is_worth_nothing() -> None:
    found = scored(torch.zeros(2000), torch.arange(2000) < 1000)
    assert found["membership_auc"] == found["membership_accuracy"] == 0.5
    assert found["tpr_at_1_in_100"] == found["tpr_at_1_in_1000"] == 0


def test_random_scores_get_the_floors_on_average() -> None:
    runs = [score_membership(*drawn(2000, 0.0, seed)) for seed in range(60)]
    for place in range(4):
        values = torch.tensor([run[place].value for run in runs]).double()
        error = values.std() / math.sqrt(len(values))
        assert abs(values.mean() - runs[0][place].floor) < 3 * error
        assert error < 0.002


@pytest.mark.parametrize(("others", "undefined"), [(99, 2), (100, 1), (999, 1), (1000, 0)])
def test_rates_that_too_few_candidates_cannot_show_are_undefined_and_say_so(others: int, undefined: int) -> None:
    held = torch.arange(2 * others) < others
    missing = [score for score in score_membership(held.float(), held) if score.missing]
    assert len(missing) == undefined
    for score in missing:
        assert math.isnan(score.value)
        assert f"of {others} non-members is less than one; grant more candidates" in score.missing


@pytest.mark.parametrize(("held", "told"), [(True, "is a member"), (False, "is no member")])
def test_candidates_that_are_all_of_one_kind_are_refused(held: bool, told: str) -> None:
    with pytest.raises(DataError, match=f"each of the 4 candidates {told}; grant members and others"):
        score_membership(torch.rand(4), torch.full((4,), held))


def test_a_truth_about_other_candidates_is_refused() -> None:
    with pytest.raises(DataError, match="scores 4 candidates, the truth is about 3"):
        score_membership(torch.rand(4), torch.tensor([True, False, True]))


def test_the_curve_rises_from_none_to_all() -> None:
    curve = compute_roc(*drawn(300, 0.5))
    for shares in (curve.false_positive_rates, curve.true_positive_rates):
        assert (shares[0], shares[-1]) == (0, 1)
        assert (shares.diff() >= 0).all()
    assert curve.true_positive_rate(1.0) == 1


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        (torch.zeros(2, 2), "one floating point number a candidate"),
        (torch.zeros(2, dtype=torch.long), "one floating point number a candidate"),
        (torch.tensor([0.0, math.nan]), "scores that are NaN"),
        (torch.zeros(0), "at least one value"),
    ],
)
def test_claims_without_the_form_of_scores_are_refused(scores: Tensor, told: str) -> None:
    with pytest.raises(AttackError, match=told):
        Membership(scores=scores)
