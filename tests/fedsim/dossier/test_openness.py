"""That no leak is shown takes all scores, and no round or random start that leaks behind the mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedsim.audit.evaluation.score import Score
from fedsim.dossier.attack_results import conclude, make_result
from fedsim.dossier.contents import Result
from fedsim.report.verdicts import score_readings
from tests.support.silent_messages import row_of

Row = dict[str, Any]
FAILURE = "the metric raised ValueError: boom"


def make_row(
    victim: int, value: float, floor: float, *, metric: str = "psnr", round: int = 1, repeat: int = 0, missing: str = ""
) -> Row:
    score = Score.against_guesses(metric, value, {"noise": floor})
    if missing:
        score = replace(Score.from_reason(metric, missing))
    return row_of(score, victim, 200) | {"round": str(round), "repeat": str(repeat), "seed": "1"}


def make_results(rows: list[Row]) -> list[Result]:
    results = []
    for position, reading in enumerate(score_readings(rows, {})):
        results.append(make_result(reading, rows, is_first=position == 0, is_main=position == 0))
    return results


def judge(rows: list[Row]) -> str:
    return conclude(make_results(rows), is_complete=True)


SILENT = [make_row(victim, 11.0, 12.0) for victim in range(5)]


def test_silent_messages_are_said_to_show_no_leak() -> None:
    assert judge(SILENT) == "no leak shown"
    ten_rounds = [make_row(victim, 11.0, 12.0, round=number) for victim in range(5) for number in range(1, 11)]
    assert judge(ten_rounds) == "no leak shown"


def test_a_victim_without_a_score_may_be_the_one_that_leaks() -> None:
    [result] = make_results([*SILENT, make_row(5, 0.0, 12.0, missing="boom")])
    assert conclude([result], is_complete=True) == "not concluded"
    assert result.open_reason == "PSNR was not computed for 1 victim: boom"


def test_a_round_without_a_score_may_be_the_one_that_leaks() -> None:
    rows = [*SILENT, make_row(0, 0.0, 12.0, round=2, missing="boom")]
    assert judge(rows) == "not concluded"


@pytest.mark.parametrize(
    ("metric", "reason", "verdict"),
    [
        ("psnr", "its network sees other images", "not concluded"),  # what is judged first has to have a verdict
        ("ssim", FAILURE, "not concluded"),
        ("lpips", "images of 8 x 8 are too small for its network", "no leak shown"),
    ],
)
def test_a_metric_that_failed_leaves_a_leak_open_and_one_that_does_not_apply_does_not(
    metric: str, reason: str, verdict: str
) -> None:
    unjudged = [make_row(victim, 0.0, 0.0, metric=metric, missing=reason) for victim in range(5)]
    judged = [make_row(victim, 0.5, 0.6, metric="label_accuracy") for victim in range(5)]
    rows = [*unjudged, *judged] if metric == "psnr" else [*SILENT, *unjudged, *judged]
    assert judge(rows) == verdict


@pytest.mark.parametrize("part", ["round", "repeat"])
def test_a_single_round_or_start_that_leaks_everything_is_not_averaged_away(part: str) -> None:
    rows = []
    for victim in range(5):
        rows += [make_row(victim, 40.0 if number == 1 else 8.0, 12.0, **{part: number}) for number in range(1, 11)]
    [result] = make_results(rows)
    assert conclude([result], is_complete=True) == "not concluded"
    name = "round 1" if part == "round" else "round 1, random start 1"
    assert result.open_reason == f"in {name} alone, PSNR is beyond its floor for all 5 victims, which the mean hides"


def test_ranks_that_are_perfect_in_one_round_are_not_averaged_away() -> None:
    rows = []
    for victim in range(5):
        for number in range(1, 11):
            value = 1.0 if number == 1 else 0.44
            rows.append(make_row(victim, value, 0.5, metric="membership_auc", round=number))
    assert judge(rows) == "not concluded"
