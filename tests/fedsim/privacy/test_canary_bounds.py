"""The lower bound of epsilon from right guesses: the mathematics alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import binomtest

from fedsim.privacy.canary_bounds import GUESS_SHARES, best_lower_bound, lower_bound, probability_bound


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "error", "expected"),
    [
        (1000, 600, 600, 1e-5, 0.05, 5.27040),
        (1000, 1000, 1000, 1e-5, 0.05, 5.78228),
        (1000, 1000, 900, 1e-5, 0.05, 2.02065),
        (100, 100, 100, 0.0, 0.05, 3.49297),
        (1000, 200, 180, 1e-5, 0.01, 1.64977),
        (5000, 1000, 650, 1e-6, 0.05, 0.50808),
        (1000, 100, 99, 1e-4, 0.05, 2.84096),
        (100_000, 1500, 1429, 1e-5, 0.05, 2.66875),
        (1000, 600, 560, 0.0, 0.05, 2.36474),
        (1000, 50, 26, 1e-5, 0.05, 0.0),
    ],
)
def test_the_bound_is_that_of_the_program_which_the_paper_prints(
    canaries: int, guesses: int, right: int, delta: float, error: float, expected: float
) -> None:
    """The expected values were computed with the program of App. D of Steinke et al. (arXiv 2305.08846)."""
    assert lower_bound(canaries, guesses, right, delta, 1 - error) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("guesses", "right"), [(20, 17), (300, 240), (1000, 999)])
def test_without_delta_it_is_the_exact_interval_of_a_share(guesses: int, right: int) -> None:
    share = binomtest(right, guesses, alternative="greater").proportion_ci(0.95, method="exact").low
    expected = math.log(share / (1 - share))
    assert lower_bound(guesses, guesses, right, 0.0, 0.95) == pytest.approx(expected, abs=1e-5)


def test_all_right_has_a_closed_form() -> None:
    share = 0.05 ** (1 / 200)
    assert lower_bound(200, 200, 200, 0.0, 0.95) == pytest.approx(math.log(share / (1 - share)), abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_randomised_response_reaches_the_chance_to_the_full(epsilon: float) -> None:
    """It tells each coin right with probability e^eps / (1 + e^eps); all outcomes of six coins are counted."""
    share, coins = math.exp(epsilon) / (1 + math.exp(epsilon)), 6
    for right in range(coins + 1):
        exact = sum(
            share ** sum(told) * (1 - share) ** (coins - sum(told))
            for told in itertools.product((0, 1), repeat=coins)
            if sum(told) >= right
        )
        assert probability_bound(coins, coins, right, epsilon, 0.0) == pytest.approx(exact)


@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_a_mechanism_that_fails_with_probability_delta_stays_below_the_chance(delta: float) -> None:
    """Randomised response for each coin, but with probability delta a coin is told: (epsilon, delta)-DP."""
    epsilon, coins = 0.5, 8
    share = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in range(coins + 1):
        really = sum(math.comb(coins, k) * share**k * (1 - share) ** (coins - k) for k in range(right, coins + 1))
        assert really <= probability_bound(coins, coins, right, epsilon, delta) + 1e-12
        assert right == 0 or really > probability_bound(coins, coins, right, epsilon, 0.0)


def test_a_mechanism_that_fails_as_a_whole_stays_below_the_chance() -> None:
    """With probability delta x m it tells all coins, which is what the delta term is for."""
    epsilon, coins, fails = 0.5, 10, 0.05
    for right in range(1, coins + 1):
        really = fails + (1 - fails) * probability_bound(coins, coins, right, epsilon, 0.0)
        assert really <= probability_bound(coins, coins, right, epsilon, fails) + 1e-12


def test_the_bound_grows_with_right_guesses_and_shrinks_with_delta_and_confidence() -> None:
    bounds = [lower_bound(500, 200, right, 1e-5, 0.95) for right in range(100, 201, 10)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 3
    assert lower_bound(500, 200, 180, 1e-3, 0.95) < lower_bound(500, 200, 180, 1e-5, 0.95)
    assert lower_bound(500, 200, 180, 1e-5, 0.999) < lower_bound(500, 200, 180, 1e-5, 0.95)
    assert lower_bound(500, 0, 0, 1e-5, 0.95) == 0.0


def test_all_that_is_guessed_right_gives_the_bound_of_all_canaries() -> None:
    inside = torch.arange(400) % 2 == 0
    found = best_lower_bound(inside.float(), inside, 0.0, 0.95)
    assert (found.canaries, found.guesses, found.correct) == (400, 400, 400)
    assert found.epsilon == pytest.approx(lower_bound(400, 400, 400, 0.0, 1 - 0.05 / len(GUESS_SHARES)))


def test_abstaining_helps_where_few_scores_tell() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(1000, generator=generator) < 0.5
    scores = torch.randn(1000, generator=generator)
    scores[:50] += 20 * (inside[:50].float() - 0.5)
    found = best_lower_bound(scores, inside, 1e-5, 0.95)
    assert found.guesses == 50
    assert found.correct >= 45


@pytest.mark.parametrize("epsilon", [0.5, pytest.param(2.0, marks=pytest.mark.thorough)])
def test_what_keeps_its_promise_is_refuted_no_more_often_than_said(epsilon: float) -> None:
    """Randomised response: the bound is above the truth in at most 5 % of audits."""
    share, generator, above = math.exp(epsilon) / (1 + math.exp(epsilon)), torch.Generator().manual_seed(1), 0
    for _ in range(100):
        inside = torch.rand(200, generator=generator) < 0.5
        told = inside ^ (torch.rand(200, generator=generator) >= share)
        scores = told.float() + 0.5 * torch.rand(200, generator=generator)
        above += best_lower_bound(scores, inside, 0.0, 0.95).epsilon > epsilon
    assert above <= 5


def test_scores_that_tell_nothing_refute_nothing() -> None:
    inside = torch.arange(100) % 2 == 0
    assert best_lower_bound(torch.zeros(100), inside, 1e-5, 0.95).epsilon == 0.0
