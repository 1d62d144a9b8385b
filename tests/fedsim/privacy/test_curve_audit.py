"""The lower bound of epsilon by a declared trade-off curve: the mathematics alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import expit, ndtr
from scipy.stats import binom

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.canary_bounds import best_lower_bound, lower_bound
from fedsim.privacy.ceilings import TradeOff, compute_tight_epsilon, compute_trade_off
from fedsim.privacy.curve_audit import curve_lower_bound, is_curve_refuted

DELTA = 1e-5


def pure_curve(epsilon: float) -> TradeOff:
    """The curve of randomised response, than which no mechanism of this epsilon tells more."""
    return TradeOff(epsilons=np.array([epsilon]), deltas=np.array([0.0]))


def score_gaussian_noise(noise: float, canaries: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of canaries that each are in a sum of their own, and which of them are in."""
    rng = torch.Generator().manual_seed(seed)
    inside = torch.rand(canaries, generator=rng) < 0.5
    return inside + noise * torch.randn(canaries, generator=rng), inside


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("guesses", [2, 10])
def test_it_is_exact_where_randomised_response_tells_all_coins(epsilon: float, guesses: int) -> None:
    chance = float(expit(epsilon)) ** guesses
    curve = pure_curve(epsilon)
    assert is_curve_refuted(curve, guesses, guesses, guesses, 1 - chance * 1.001)
    assert not is_curve_refuted(curve, guesses, guesses, guesses, 1 - chance * 0.999)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_what_randomised_response_does_more_often_is_not_refuted(epsilon: float) -> None:
    refuted = 0
    for right in range(41):
        chance = float(binom.sf(right - 1, 40, expit(epsilon)))
        if is_curve_refuted(pure_curve(epsilon), 40, 40, right, 0.95):
            refuted += 1
            assert chance < 0.05
    assert refuted >= 5, "nearly all right is refuted"


def test_what_gaussian_noise_does_more_often_is_not_refuted() -> None:
    curve = compute_trade_off([Mechanism(scale=1.0, neighbours="replaced")])
    assert curve is not None
    for right in range(0, 101, 4):
        if is_curve_refuted(curve, 100, 100, right, 0.95):
            assert binom.sf(right - 1, 100, ndtr(0.5)) < 0.05
    assert is_curve_refuted(curve, 100, 100, 96, 0.95)


def test_guesses_of_a_few_of_many_canaries_count_less() -> None:
    assert is_curve_refuted(pure_curve(1.0), 50, 50, 46, 0.95)
    assert not is_curve_refuted(pure_curve(1.0), 50, 50, 38, 0.95)
    curve = TradeOff(epsilons=np.array([0.0]), deltas=np.array([0.02]))
    assert is_curve_refuted(curve, 50, 50, 48, 0.95)
    assert not is_curve_refuted(curve, 5000, 50, 48, 0.95), "delta may reveal 2 % of the canaries"


@pytest.mark.parametrize("noise", [1.0, pytest.param(0.5, marks=pytest.mark.thorough)])
def test_of_gaussian_noise_about_half_of_epsilon_is_shown_and_never_more_than_all(noise: float) -> None:
    mechanism = Mechanism(scale=noise)
    epsilon = compute_tight_epsilon(mechanism, DELTA)
    for seed in range(3):
        scores, inside = score_gaussian_noise(noise, 4000, seed)
        bound = best_lower_bound(scores, inside, DELTA, 0.95, [mechanism])
        assert bound.uses_curve
        assert 0.45 * epsilon < bound.epsilon <= epsilon
        assert bound.epsilon > best_lower_bound(scores, inside, DELTA, 0.95).epsilon


def test_half_the_noise_refutes_the_declared_curve() -> None:
    scores, inside = score_gaussian_noise(0.25, 4000, seed=0)
    declared = Mechanism(scale=0.75)
    bound = best_lower_bound(scores, inside, DELTA, 0.95, [declared])
    assert bound.epsilon > compute_tight_epsilon(declared, DELTA)
    assert best_lower_bound(scores, inside, DELTA, 0.95).epsilon < compute_tight_epsilon(declared, DELTA)


def test_releases_of_several_kinds_are_composed() -> None:
    rounds = [Mechanism(scale=4.0, releases=2), Mechanism(scale=3.0, releases=2)]
    together = curve_lower_bound(rounds, 1000, 200, 180, DELTA, 0.95)
    assert together > lower_bound(1000, 200, 180, DELTA, 0.95)
    assert together == pytest.approx(curve_lower_bound(rounds[::-1], 1000, 200, 180, DELTA, 0.95))


def test_pure_privacy_is_measured_without_a_delta() -> None:
    declared = Mechanism(noise="laplace", scale=10.0, releases=10)
    bound = curve_lower_bound([declared], 2000, 400, 240, 0.0, 0.975)
    assert 0.2 < bound < 1.0
    assert curve_lower_bound([Mechanism(scale=1.0)], 2000, 400, 400, 0.0, 0.975) == math.inf


def test_chance_refutes_nothing() -> None:
    assert curve_lower_bound([Mechanism(scale=1.0)], 1000, 1000, 500, DELTA, 0.95) == 0.0
    assert not math.isnan(curve_lower_bound([Mechanism(scale=1e-3)], 10, 10, 10, DELTA, 0.95))
