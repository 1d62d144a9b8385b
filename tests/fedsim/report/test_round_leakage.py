"""Rounds stand apart where several were attacked, by curve and by sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedsim.audit.evaluation.score import Score
from fedsim.report.round_leakage import RoundLeakage, draw_rounds, split_by_round
from fedsim.report.verdicts import score_readings
from tests.support.silent_messages import row_of


def make_rows(values: dict[int, list[float]], metric: str = "psnr", floor: float = 10.0) -> list[dict[str, Any]]:
    """Return a row for each victim of each round; by PSNR a second one, of the share of exact examples."""
    rows = []
    for number, scores in values.items():
        for victim, value in enumerate(scores):
            found = [Score.against_guesses(metric, value, {"noise": floor})]
            if metric == "psnr":
                found.append(Score.against_guesses("exact", float(value >= 40), {"noise": 0.0}))
            rows += [row_of(score, victim, 4) | {"round": str(number)} for score in found]
    return rows


def split(values: dict[int, list[float]], metric: str = "psnr", **settings: Any) -> dict[str, RoundLeakage]:
    rows = make_rows(values, metric, **settings)
    return split_by_round(score_readings(rows, {}), rows)


def test_a_strong_round_is_not_hidden_in_the_mean() -> None:
    (leakage,) = split({1: [30.0, 32.0], 2: [11.0, 9.0]}).values()
    assert {number: item.mean for number, item in leakage.rounds.items()} == {1: 31.0, 2: 10.0}
    assert leakage.sentence == (
        "PSNR by round: 31 dB where a guess gets 10 in round 1, 10 dB where a guess gets 10 in round 2."
    )


def test_of_many_rounds_the_extremes_are_named() -> None:
    means = {1: [12.0], 3: [140.0], 7: [9.0], 10: [11.0]}
    (leakage,) = split(means).values()
    assert leakage.sentence == (
        "By PSNR, of 4 attacked rounds, round 3 is furthest beyond the best guess (exact where a guess gets 10), "
        "round 7 least (9 dB where a guess gets 10)."
    )
    (errors,) = split({key: [value[0] / 100] for key, value in means.items()}, "mse", floor=1.0).values()
    assert "round 7 is furthest beyond the best guess (0.09" in errors.sentence
    assert "round 3 least (1.4" in errors.sentence


def test_a_round_is_exact_only_where_each_of_its_victims_is() -> None:
    (leakage,) = split({1: [140.0, 140.0, 10.0], 2: [140.0, 140.0, 140.0]}).values()
    assert leakage.sentence == (
        "PSNR by round: 96.67 dB where a guess gets 10 in round 1, exact where a guess gets 10 in round 2."
    )


def test_rounds_are_ranked_beside_their_own_guess() -> None:
    rows = make_rows({1: [20.0] * 5}, floor=22.0) + make_rows({2: [14.0] * 5, 3: [13.0] * 5, 4: [13.5] * 5})
    (leakage,) = split_by_round(score_readings(rows, {}), rows).values()
    assert "round 2 is furthest beyond the best guess (14 dB where a guess gets 10), round 1 least" in leakage.sentence


def test_where_no_round_leaks_or_all_are_equal_none_leaks_most() -> None:
    (below,) = split({number: [8 - number / 10] * 5 for number in (1, 2, 3, 4)}).values()
    assert below.sentence == "By PSNR, none of 4 attacked rounds is beyond the best guess."
    (equal,) = split({number: [15.0] * 5 for number in (1, 2, 3, 4)}).values()
    assert equal.sentence == "By PSNR, all 4 attacked rounds are equally far from the best guess."


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_round_of_infinite_scores_is_named_and_the_others_drawn(rounds: int) -> None:
    values = {number: [math.inf if number == 1 else 11.0 + number] * 5 for number in range(1, rounds + 1)}
    leakages = split(values)
    assert "exact where a guess gets 10" in leakages["a"].sentence
    (chart,) = draw_rounds(leakages)
    assert "a, infinite in round 1" in chart


def test_rounds_without_scores_and_of_other_victims_are_said() -> None:
    rows = make_rows({1: [14.0] * 5, 2: [15.0] * 5, 3: [16.0] * 5})
    for row in rows:
        if row["round"] == "3":
            row |= {"missing": "boom", "value": math.nan, "floor": math.nan}
    (leakage,) = split_by_round(score_readings(rows, {}), rows).values()
    assert leakage.sentence.endswith("in round 2. There is no score in round 3.")
    others = [row for row in rows if (row["round"] == "1") == (row["victim"] < 3) and row["round"] != "3"]
    (different,) = split_by_round(score_readings(others, {}), others).values()
    assert different.sentence.endswith("Rounds are of different victims.")


def test_one_round_is_no_curve() -> None:
    assert not split({1: [30.0, 32.0]})
    assert not draw_rounds({})


def test_an_attack_on_several_rounds_at_once_belongs_to_none() -> None:
    rows = [row | {"round": "1-10"} for row in make_rows({1: [0.7, 0.8]}, "membership_auc", floor=0.5)]
    assert split_by_round(score_readings(rows, {}), rows) == {}


def test_the_curve_has_each_round_and_the_guess() -> None:
    (chart,) = draw_rounds(split({1: [30.0, 32.0, 31.5], 2: [11.0, 9.0, 12.0]}))
    for text in ("PSNR by attacked round", "best guess", "mean PSNR (dB)", "31.17", "10.67"):
        assert text in chart, text
