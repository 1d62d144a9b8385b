"""Rounds stand apart where several were attacked, by curve and by sentence."""

from __future__ import annotations

from typing import Any

from fedsim.audit.evaluation.score import Score
from fedsim.report.round_leakage import RoundLeakage, draw_rounds, split_by_round
from fedsim.report.verdicts import score_readings
from tests.support.silent_messages import row_of


def make_rows(values: dict[int, list[float]], metric: str = "psnr", floor: float = 10.0) -> list[dict[str, Any]]:
    """Return a row for each victim of each round."""
    rows = []
    for number, scores in values.items():
        for victim, value in enumerate(scores):
            rows.append(
                row_of(Score.against_guesses(metric, value, {"noise": floor}), victim, 4) | {"round": str(number)}
            )
    return rows


def split(values: dict[int, list[float]], metric: str = "psnr", **settings: Any) -> dict[str, RoundLeakage]:
    rows = make_rows(values, metric, **settings)
    return split_by_round(score_readings(rows, {}), rows)


def test_a_strong_round_is_not_hidden_in_the_mean() -> None:
    (leakage,) = split({1: [30.0, 32.0], 2: [11.0, 9.0]}).values()
    assert {number: item.mean for number, item in leakage.rounds.items()} == {1: 31.0, 2: 10.0}
    assert leakage.sentence == "PSNR by round: 31 dB in round 1, 10 dB in round 2."


def test_of_many_rounds_the_extremes_are_named() -> None:
    means = {1: [12.0], 3: [140.0], 7: [9.0], 10: [11.0]}
    (leakage,) = split(means).values()
    assert leakage.sentence == "By PSNR, of 4 attacked rounds, round 3 leaks most (exact), round 7 least (9 dB)."
    (errors,) = split({key: [value[0] / 100] for key, value in means.items()}, "mse", floor=1.0).values()
    assert "round 7 leaks most (0.09), round 3 least (1.4)" in errors.sentence


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
