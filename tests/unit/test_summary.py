"""Scores in short: means, intervals, and what is said where there are none."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsim.summary import summarise

_clients = itertools.count()


def row(value: float | str, **keys: Any) -> dict[str, Any]:
    return {
        "attack": "sme",
        "victim": next(_clients),
        "round": 1,
        "metric": "psnr",
        "value": value,
        "floor": 10.0,
        "floor_guess": "noise",
        "ceiling": "",
        "higher_is_better": True,
        "missing": "",
    } | keys


def test_the_interval_is_students() -> None:
    values = [20.0, 22.0, 27.0, 23.0]
    [summary] = summarise([row(v) for v in values])
    low, high = stats.t.interval(0.95, 3, np.mean(values), np.std(values, ddof=1) / 2)
    assert summary.mean == 23.0
    assert summary.mean - summary.margin == pytest.approx(low)
    assert summary.mean + summary.margin == pytest.approx(high)
    assert summary.text.startswith("23 ± ")
    assert summary.text.endswith("(n = 4)")


def test_the_nearest_public_examples_are_averaged_over_victims() -> None:
    [summary] = summarise([row(20.0, nearest_public=15.0), row(20.0, nearest_public=17.0)])
    assert summary.nearest == 16.0
    assert summary.nearest_text == "16"
    [without] = summarise([row(20.0), row(21.0, nearest_public=math.nan)])
    assert math.isnan(without.nearest)
    assert without.nearest_text == ""


def test_one_score_has_no_interval() -> None:
    [summary] = summarise([row(20.0)])
    assert math.isnan(summary.margin)
    assert summary.text == "20 (n = 1)"
    assert summary.floor_text == "10 (noise)"


def test_a_missing_score_says_why() -> None:
    [summary] = summarise([row(math.nan, missing="no weights", floor=math.nan, floor_guess="")])
    assert summary.text == "not computed: no weights"
    assert summary.floor_text == ""


def test_missing_scores_do_not_count_among_the_others() -> None:
    gone = row(math.nan, missing="too small", floor=math.nan, floor_guess="")
    [summary] = summarise([gone, row(20.0), gone])
    assert (summary.count, summary.mean, summary.missing) == (1, 20.0, "")
    assert summary.floor_text == "10 (noise)"


def test_rows_read_back_from_the_file_say_the_same() -> None:
    rows = [row(20.0, ceiling=1.0, higher_is_better=False), row(21.0, ceiling=1.0, higher_is_better=False)]
    texts = [{key: str(value) for key, value in item.items()} for item in rows]
    assert summarise(texts) == summarise(rows)
    assert summarise(texts)[0].direction == "lower"
    assert summarise(texts)[0].ceiling == 1.0


def test_attacks_and_metrics_are_kept_apart_in_order_of_appearance() -> None:
    rows = [row(1.0, attack="b"), row(2.0, attack="a"), row(3.0, attack="b", metric="ssim"), row(5.0, attack="b")]
    assert [(s.attack, s.metric, s.mean) for s in summarise(rows)] == [
        ("b", "psnr", 3.0),
        ("a", "psnr", 2.0),
        ("b", "ssim", 3.0),
    ]
    assert summarise([]) == []


def test_the_guess_behind_the_floor_is_the_most_frequent_one() -> None:
    rows = [row(1.0, floor_guess=guess) for guess in ("noise", "mean", "mean")]
    assert summarise(rows)[0].floor_guess == "mean"


def test_perfect_reconstructions_have_an_infinite_psnr_and_no_interval() -> None:
    [summary] = summarise([row(math.inf), row(30.0)])
    assert summary.mean == math.inf
    assert summary.text == "inf (n = 2)"


def test_random_starts_on_one_update_are_no_new_victims() -> None:
    rows = [row(value, victim=victim) for victim, value in [(0, 20.0), (0, 22.0), (1, 30.0), (1, 32.0)]]
    [summary] = summarise(rows)
    assert (summary.count, summary.mean) == (2, 26.0)
    [alone] = summarise(rows[:2])
    assert (alone.count, alone.mean) == (2, 21.0)
    assert math.isfinite(alone.margin)


def test_other_rounds_of_a_victim_are_no_new_victims() -> None:
    rows = [
        row(value, victim=victim, round=number)
        for victim, number, value in [(0, 1, 20.0), (0, 2, 22.0), (0, 2, 24.0), (1, 1, 30.0), (1, 2, 32.0)]
    ]
    [summary] = summarise(rows)
    assert (summary.count, summary.mean) == (2, (21.5 + 31.0) / 2)
    [alone] = summarise(rows[:3])
    assert (alone.count, alone.mean) == (2, 21.5)


def test_the_advantage_over_the_floor_is_paired_by_victim() -> None:
    rows = [row(value, floor=value - 3.0) for value in (10.0, 20.0, 60.0)]
    [summary] = summarise(rows)
    assert (summary.gain, summary.gain_margin) == (3.0, 0.0)
    [lower] = summarise([row(1.0, floor=4.0, higher_is_better=False)])
    assert lower.gain == 3.0
