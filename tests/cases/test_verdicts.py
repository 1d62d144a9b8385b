"""What scores allow to be said: exact intervals of shares, verdicts by the chance that a guess has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from fedsim.audit.evaluation import statistics
from fedsim.cli.options import print_error
from fedsim.report.summary import summarise
from fedsim.report.verdicts import GUESSING, LEAKS, judge_summary
from tests.support.experiments import make_tiny_config, run_serial


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
            "instrument": "", "examples": 10,
        }
        for victim, value in enumerate(values)
    ]  # fmt: skip
    (summary,) = summarise(rows)
    return judge_summary(summary)[0]


@pytest.mark.parametrize(
    "count", [5, pytest.param(10, marks=pytest.mark.thorough), pytest.param(20, marks=pytest.mark.thorough)]
)
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


def test_what_canaries_can_show_is_said_before_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    defense = [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}]
    config = make_tiny_config(canaries={"count": 50, "clients": [0]}, defense=defense, federation={"rounds": 1})
    with caplog.at_level("INFO"):
        run_serial(config, tmp_path / "run")
    said = [record.getMessage() for record in caplog.records]
    (place,) = [place for place, text in enumerate(said) if "50 canaries refute nothing" in text]
    assert place < next(place for place, text in enumerate(said) if text.startswith("round 1"))


def test_what_is_printed_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("no layer '\x1b[2J\x07w'" + "x" * 20_000)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\x07" not in said
    assert len(said) < 11_000
