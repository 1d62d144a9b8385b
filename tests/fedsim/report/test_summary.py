"""Scores in short: means, intervals, and what is said where there are none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedsim.audit.evaluation.properties import score_messages
from fedsim.base.errors import RunError
from fedsim.interfaces.attack import GLOBAL, OPTIMAL
from fedsim.report.headline import headline
from fedsim.report.summary import difference_interval, interval, summarise
from fedsim.report.verdicts import AttackTraits, judge_summary, score_readings
from tests.support.score_rows import make_score

_clients = itertools.count()


def row(value: float | str, **keys: Any) -> dict[str, Any]:
    return make_score(value, **{"victim": next(_clients)} | keys)


def test_the_interval_is_students() -> None:
    values = [20.0, 22.0, 27.0, 23.0]
    [summary] = summarise([row(v) for v in values])
    low, high = stats.t.interval(0.95, 3, np.mean(values), np.std(values, ddof=1) / 2)
    assert summary.mean == 23.0
    assert (summary.low, summary.high) == (pytest.approx(low), pytest.approx(high))
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
    assert math.isnan(summary.low)
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
    assert summary.text == "20 (n = 1, not computed for 1)"


def test_victims_without_a_score_are_no_leak_and_are_told() -> None:
    gone = [row(math.nan, missing="too dark", floor=math.nan, floor_guess="") for _ in range(2)]
    leaks = [row(20.0) for _ in range(5)]
    assert judge_summary(summarise(leaks)[0]) == ("leaks", "5 of 5 victims")
    [summary] = summarise([*leaks, *gone])
    remark = "5 of 5 victims beyond the floor; not computed for 2 victims: too dark"
    assert judge_summary(summary) == ("undecided", remark)
    # A victim of which one of two rounds has a score has one.
    [round_only] = summarise([*leaks, gone[0] | {"victim": leaks[0]["victim"], "round": 2}])
    assert judge_summary(round_only) == ("leaks", "5 of 5 victims")


def test_rows_read_back_from_the_file_say_the_same() -> None:
    rows = [row(value, ceiling=1.0, nearest_public=5.0, higher_is_better=False) for value in (20.0, 21.0)]
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
    assert alone.text.endswith("(n = 2 starts)")
    assert math.isfinite(alone.low)


def test_other_rounds_of_a_victim_are_no_new_victims() -> None:
    rows = [
        row(value, victim=victim, round=number)
        for victim, number, value in [(0, 1, 20.0), (0, 2, 22.0), (0, 2, 24.0), (1, 1, 30.0), (1, 2, 32.0)]
    ]
    [summary] = summarise(rows)
    assert (summary.count, summary.mean) == (2, (21.5 + 31.0) / 2)
    [alone] = summarise(rows[:3])
    assert (alone.count, alone.mean) == (2, 21.5)
    assert alone.text.endswith("(n = 2 rounds)")


def test_the_advantage_over_the_floor_is_paired_by_victim() -> None:
    rows = [row(value, floor=value - 3.0) for value in (10.0, 20.0, 60.0)]
    [summary] = summarise(rows)
    assert (summary.gain, summary.num_beyond) == (3.0, 3)
    [lower] = summarise([row(1.0, floor=4.0, higher_is_better=False)])
    assert lower.gain == 3.0


Sample = Callable[[np.random.Generator, int], Any]


@pytest.mark.parametrize("count", [3, 5, 10, 30])
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        pytest.param(lambda rng, n: (rng.random(n) < 0.2).astype(float), 0.2, id="all or nothing"),
        pytest.param(lambda rng, n: np.where(rng.random(n) < 0.5, 0.1, 0.9), 0.5, id="two heaps"),
        pytest.param(lambda rng, n: np.where(rng.random(n) < 0.2, 0.1, 0.9), 0.74, id="two heaps, one small"),
        pytest.param(lambda rng, n: rng.beta(20, 5, n), 0.8, id="continuous"),
    ],
)
def test_the_interval_of_a_share_holds_the_true_mean_and_stays_a_share(count: int, draw: Sample, mean: float) -> None:
    """Student's covers two heaps with three victims in 62 % of cases, and leaves [0, 1]."""
    rng = np.random.default_rng(count)
    limits = np.array([interval("label_accuracy", draw(rng, count)) for _ in range(150)])
    assert limits.min() >= 0
    assert limits.max() <= 1
    assert np.mean((limits[:, 0] <= mean) & (mean <= limits[:, 1])) > 0.92


def test_the_interval_of_an_all_or_nothing_share_is_the_binomial_one() -> None:
    low, high = interval("source_accuracy", np.array([1.0] * 7 + [0.0] * 3))
    exact = stats.binomtest(7, 10).proportion_ci(0.95, "exact")
    assert (low, high) == (pytest.approx(exact.low, abs=0.02), pytest.approx(exact.high, abs=0.02))


def test_a_share_of_three_victims_is_told_within_its_range() -> None:
    [summary] = summarise([row(value, metric="label_accuracy", floor=0.1) for value in (0.0, 0.0, 0.66)])
    assert summary.text == "0.22 (0.006 to 0.8) (n = 3)"


def test_students_interval_ends_where_the_metric_does() -> None:
    low, _ = interval("mse", np.array([0.0, 0.0, 0.3]))
    _, high = interval("ssim", np.array([0.2, 0.9, 0.9]))
    assert (low, high) == (0.0, 1.0)


def verdicts(gains: list[float], **keys: Any) -> tuple[str, str]:
    [summary] = summarise([row(10 + gain, floor=10.0, **keys) for gain in gains])
    return judge_summary(summary)


@pytest.mark.parametrize(
    ("gains", "verdict", "remark"),
    [
        ([5.0], "beyond the floor", "one victim only"),
        ([-5.0], "not beyond the floor", "one victim only"),
        ([5.0, 5.1, 5.2, 5.3], "beyond the floor", "4 of 4 victims, too few to tell"),
        ([5.0, -0.1], "undecided", "1 of 2 victims beyond the floor, too few to tell"),
        ([-1.0, -2.0, 0.0], "not beyond the floor", "0 of 3 victims, too few to tell"),
        ([5.0, 5.1, 5.2, 5.3, 5.4], "leaks", "5 of 5 victims"),
        ([5.0, 5.1, 5.2, 5.3, -0.1], "undecided", "4 of 5 victims beyond the floor"),
        ([1.0] * 9 + [-0.1], "leaks", "9 of 10 victims"),
        ([1.0] * 8 + [-0.1] * 2, "undecided", "8 of 10 victims beyond the floor"),
        ([0.1] * 9 + [-9.0], "undecided", "9 of 10 victims beyond the floor"),
        ([-1.0] * 5 + [0.1], "no better than guessing", "1 of 6 victims beyond the floor"),
        ([0.0] * 6, "no better than guessing", "0 of 6 victims beyond the floor"),
        ([math.inf] * 5, "leaks", "5 of 5 victims"),
    ],
)
def test_a_score_says_no_more_than_its_victims_carry(gains: list[float], verdict: str, remark: str) -> None:
    assert verdicts(gains) == (verdict, remark)


@pytest.mark.parametrize("victims", [3, 6])
def test_an_attack_below_what_public_data_say_is_told_so(victims: int) -> None:
    below = [row(0.6, metric="attribute_accuracy", floor=0.7, floor_guess="imputed from public data")] * victims
    [summary] = summarise([item | {"victim": number} for number, item in enumerate(below)])
    assert judge_summary(summary)[0] == "worse than imputation"


def test_many_rounds_of_one_victim_do_not_make_a_leak() -> None:
    rows = [row(15.0, victim=0, round=number) for number in range(20)]
    assert judge_summary(summarise(rows)[0]) == ("beyond the floor", "20 of 20 rounds, of one victim only")


@pytest.mark.parametrize(
    "clients", [6, pytest.param(8, marks=pytest.mark.thorough), pytest.param(20, marks=pytest.mark.thorough)]
)
def test_messages_that_say_nothing_of_a_property_hardly_ever_look_like_a_leak(clients: int) -> None:
    rng, held = np.random.default_rng(0), torch.arange(clients) % 2 == 0
    wrong = 0
    for _ in range(200):
        scores = torch.from_numpy(rng.random(clients))
        areas = [score_messages(scores, held, torch.arange(clients) == victim, held) for victim in range(clients)]
        [summary] = summarise(row(area.value, metric=area.metric, floor=area.floor) for area, _ in areas)
        wrong += judge_summary(summary)[0] == "leaks" or not (
            math.isnan(summary.low) or summary.low <= 0.5 <= summary.high
        )
    assert wrong <= 10  # one in twenty


def test_victims_that_are_compared_with_one_another_are_no_independent_cases() -> None:
    assert verdicts([0.5] * 8, metric="property_auc") == (
        "beyond the floor",
        "8 of 8 victims, which are compared with one another",
    )
    [alone] = summarise(rows_of("a", "property_accuracy", 0.5, 8))
    assert judge_summary(alone)[0] == "leaks"


def test_what_is_no_leakage_has_no_verdict() -> None:
    assert verdicts([1.0] * 6, metric="l_sim")[0] == ""
    verdict, reason = verdicts([1.0] * 6, metric="their_error")  # which may say nothing about leakage
    assert (verdict, reason.partition(",")[0]) == ("", "metric 'their_error' is not installed here")
    [unknown] = summarise([row(20.0, floor=math.nan, floor_guess="")])
    assert judge_summary(unknown) == ("", "no floor to compare with")


def rows_of(attack: str, metric: str, gain: float, count: int = 6, **keys: Any) -> list[dict[str, Any]]:
    return [row(0.5 + gain, floor=0.5, attack=attack, metric=metric, victim=v, **keys) for v in range(count)]


def test_the_headline_is_made_of_the_readings_in_the_table() -> None:
    rows = rows_of("ig", "psnr", -0.1) + rows_of("ig", "label_accuracy", 0.2) + rows_of("sme", "psnr", 0.3)
    found = score_readings(
        rows + rows_of("dlg", "psnr", math.nan, missing="x"), {"ig": AttackTraits(main_metric="psnr")}
    )
    assert headline(found) == (
        "By label accuracy, ig finds a leak. By PSNR, sme finds a leak. By PSNR, ig is no better than guessing. "
        "There is no verdict on dlg."
    )
    told = {line.summary.attack for line in found if line.verdict == "leaks"}
    assert told == {"ig", "sme"}


def test_an_attack_is_named_with_all_metrics_by_which_it_leaks_beside_the_first() -> None:
    rows = [
        r for name in ("ig", "ig adaptive") for r in rows_of(name, "psnr", -0.1) + rows_of(name, "label_accuracy", 0.2)
    ]
    rows += rows_of("ig adaptive", "ssim", 0.1) + rows_of("ig adaptive", "recovered", 0.45)
    assert headline(score_readings(rows, {})) == (
        "By label accuracy, ig finds a leak. By label accuracy, SSIM and share recovered, ig adaptive finds a leak. "
        "By PSNR, ig and ig adaptive are no better than guessing."
    )


def test_too_few_victims_are_told_in_the_headline() -> None:
    assert headline(score_readings(rows_of("sme", "psnr", 0.3, count=3), {})) == (
        "By PSNR, sme is beyond the floor. Only 3 victims were attacked, too few to conclude from."
    )
    assert headline([]) == ""


def test_attacks_whose_titles_have_commas_are_told_apart_in_the_headline() -> None:
    rows = [r for name in ("aia, best", "sme", "ig") for r in rows_of(name, "psnr", 0.3)]
    assert headline(score_readings(rows, {})) == "By PSNR, 'aia, best', 'sme' and 'ig' find a leak."


def test_metrics_whose_titles_differ_behind_a_comma_are_told_apart_in_the_headline() -> None:
    rows = [*rows_of("sratta", "pairs_found", 0.3), *rows_of("sratta", "rand_index", 0.3)]
    assert headline(score_readings(rows, {})).startswith("By pairs of one client (found), sratta finds a leak.")


def test_baselines_are_not_counted_as_attacks() -> None:
    rows = [r for name in ("lmra", "shared-model", "aia, best") for r in rows_of(name, "zest", 0.2)]
    found = score_readings(
        rows,
        {("shared-model", "0a1b"): AttackTraits(source=GLOBAL), ("aia, best", "0a1b"): AttackTraits(source=OPTIMAL)},
    )
    assert headline(found) == (
        "By Zest, lmra finds a leak. Baselines are not counted as attacks. By Zest, shared-model finds a leak."
    )
    assert [line.verdict for line in found] == ["leaks", "leaks", ""]
    assert "a baseline: it reads the global model as it was sent" in found[1].remark


def test_what_an_attack_may_beat_is_not_called_a_bound() -> None:
    [distance] = summarise(rows_of("lmra", "local_loss", 0.2, ceiling=0.4))
    assert distance.best_text == "0.4 by the optimal local model"
    [share] = summarise(rows_of("sia", "source_accuracy", 0.2, ceiling=1.0))
    assert share.best_text == "at most 1"


@pytest.mark.parametrize("settings", ["", "{", "[1]"])
def test_a_table_whose_settings_cannot_be_read_is_refused(settings: str) -> None:
    rows = [row(20.0, settings=settings), row(21.0, variant="ffff")]
    with pytest.raises(RunError, match=r"^scores\.csv: the settings of 'sme' are .*, expected a table in JSON"):
        summarise(rows)


def test_shares_that_fall_for_each_victim_have_a_difference_below_zero() -> None:
    """By the interval that shares have, which spans a third of their range for six victims, it would hold 0."""
    low, high = difference_interval("identified", np.array([-0.5, -0.4, -0.45, -0.3, -0.5, -0.4]))
    assert -0.6 < low < high < -0.3
    low, high = difference_interval("identified", np.array([-0.4] * 6))
    assert low < -0.4 < 0 < high, "equal ones do not tell how much they vary"


def test_doubts_stand_in_the_headline_and_beside_the_verdict() -> None:
    doubt = "sme, client 0: its claims are in another unit; claim others"
    found = score_readings([row(5.0, doubt=doubt), row(6.0, doubt=""), row(7.0, doubt=doubt)], {})
    assert "Scores of sme are in doubt for 2 findings: sme, client 0: its claims are in another unit." in headline(
        found
    )
    assert found[0].remark.endswith("; in doubt for 2 findings: sme, client 0: its claims are in another unit")
    assert found[0].brief_remark.endswith("; in doubt for 2 findings")


def test_the_same_doubt_about_several_attacks_is_one_sentence() -> None:
    rows = [row(5.0, attack=name, doubt="the truth may be another; look") for name in ("sme", "dlg")]
    assert "Scores of sme and dlg are in doubt for 1 finding: the truth may be another." in headline(
        score_readings(rows, {})
    )
