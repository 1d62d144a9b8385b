"""What scores allow to be said: exact intervals of shares, verdicts by the chance that a guess has."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from fedsim.evaluation import statistics
from fedsim.reporting.summary import GUESSING, LEAKS, reading, summarise


@pytest.mark.parametrize(("successes", "count"), [(9, 12), (0, 7), (7, 7), (1, 40)])
def test_the_interval_of_a_share_of_zeros_and_ones_is_exact(successes: int, count: int) -> None:
    values = np.array([1.0] * successes + [0.0] * (count - successes))
    expected = binomtest(successes, count).proportion_ci(method="exact")
    assert statistics.share_interval(values) == pytest.approx((expected.low, expected.high), abs=1e-9)


def verdict_of(values: list[float], floor: float, metric: str = "property_client_accuracy") -> str:
    rows = [
        {
            "attack": "a", "title": "a", "variant": "v", "victim": victim, "round": 1, "repeat": 0, "metric": metric,
            "value": value, "floor": floor, "floor_guess": "the kind of most", "nearest_public": "nan",
            "ceiling": "1.0", "higher_is_better": "True", "missing": "", "settings": "{}", "granted": "",
        }
        for victim, value in enumerate(values)
    ]  # fmt: skip
    (summary,) = summarise(rows)
    return reading(summary)[0]


@pytest.mark.parametrize("count", [5, 10, 20])
@pytest.mark.parametrize("majority", [0.5, 0.6, 0.8])
def test_a_guess_of_the_prior_hardly_ever_leaks(count: int, majority: float) -> None:
    """Each victim's property is told rightly as often as the floor says, by chance."""
    draw = np.random.default_rng(0)
    leaking = sum(
        verdict_of((draw.random(count) < majority).astype(float).tolist(), majority) == LEAKS for _ in range(400)
    )
    assert leaking <= 0.05 * 400 + 8  # two standard deviations of the simulation above 5 %


def test_who_says_what_most_are_is_guessing() -> None:
    assert verdict_of([1.0] * 12 + [0.0] * 8, 0.6) == GUESSING


def test_who_is_always_right_leaks() -> None:
    assert verdict_of([1.0] * 20, 0.6) == LEAKS
