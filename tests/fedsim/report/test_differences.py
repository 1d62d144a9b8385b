"""Differences between runs: paired by victim, over victims alone, and never of clients that are not the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from fedsim.report.differences import (
    EQUAL,
    LESS,
    MIXED,
    MORE,
    NOT_SHOWN,
    SEEN_LESS,
    Difference,
    difference_text,
    differences,
    explain_equality,
    explain_other_clients,
    incomparable_attacks,
    score_beside_floor,
    unshared_attacks,
)


def rows(values: Mapping[int, float], metric: str = "psnr", higher: bool = True, **others: Any) -> list[dict[str, Any]]:
    """One update of each victim, with its score."""
    return [
        {
            "attack": "sme", "victim": victim, "round": "1", "repeat": 0, "metric": metric, "value": value,
            "floor": 0.0, "floor_guess": "grey", "nearest_public": math.nan, "ceiling": "", "missing": "",
            "examples": 10, "instrument": "", "higher_is_better": str(higher), "variant": "v", "settings": "{}",
            "granted": "labels",
        }
        | others
        for victim, value in values.items()
    ]  # fmt: skip


def one(base: list[dict[str, Any]], other: list[dict[str, Any]], why: str = "") -> Difference:
    (found,) = differences(base, other, why)
    return found


def test_each_victim_is_compared_with_itself() -> None:
    base = {victim: 10.0 * victim for victim in range(6)}  # victims differ much, each loses 1 dB
    found = one(rows(base), rows({victim: value - 1 for victim, value in base.items()}))
    assert found.paired
    assert (found.mean, found.low, found.high) == pytest.approx((-1, -1, -1))
    assert (found.verdict, found.remark) == (LESS, "more in 0, less in 6 of 6 victims")


def test_each_score_stands_beside_the_guess_of_its_run() -> None:
    base, other = rows(dict.fromkeys(range(6), 9.0), floor=12.7), rows(dict.fromkeys(range(6), 8.0), floor_guess="")
    found = one(base, other)
    assert score_beside_floor(found.first, found.base) == "9 (guess 12.7)"
    assert score_beside_floor(found.value, found.other) == "8"


def test_lower_scores_leak_more_where_lower_is_closer() -> None:
    base = dict.fromkeys(range(6), 0.2)
    found = one(rows(base, "mse", higher=False), rows(dict.fromkeys(range(6), 0.1), "mse", higher=False))
    assert found.mean == pytest.approx(-0.1)
    assert found.verdict == MORE


def test_five_victims_are_too_few_and_so_are_rounds_of_one() -> None:
    five = one(rows(dict.fromkeys(range(5), 2.0)), rows(dict.fromkeys(range(5), 1.0)))
    assert (five.verdict, five.remark) == (SEEN_LESS, "more in 0, less in 5 of 5 victims, too few to tell")
    base = [row for number in range(8) for row in rows({3: 2.0}, round=str(number))]
    other = [row for number in range(8) for row in rows({3: 1.0}, round=str(number))]
    rounds = one(base, other)
    assert (rounds.verdict, rounds.unit, rounds.count) == (SEEN_LESS, "round", 8)


def test_further_rounds_and_starts_of_a_victim_count_once() -> None:
    base = [row for number in ("1", "2") for row in rows(dict.fromkeys(range(6), 2.0), round=number)]
    other = [row for number in ("1", "2") for row in rows(dict.fromkeys(range(6), 1.0), round=number)]
    assert one(base, other).count == 6


def test_victims_that_are_compared_with_one_another_show_nothing() -> None:
    base, other = (rows({v: value + v / 100 for v in range(8)}, "property_auc") for value in (0.9, 0.5))
    paired = one(base, other)
    assert math.isnan(paired.low)
    assert paired.verdict == SEEN_LESS
    assert paired.remark == "more in 0, less in 8 of 8 victims, which are compared with one another"
    unpaired = one(base, other, "the seeds differ")
    assert math.isnan(unpaired.low)
    assert unpaired.verdict == ""


def test_signs_that_chance_gives_show_nothing() -> None:
    base = dict.fromkeys(range(7), 0.0)
    found = one(rows(base), rows(base | dict.fromkeys(range(6), 1.0) | {6: -1.0}))
    assert found.verdict == NOT_SHOWN  # 6 of 7 is 1 of 8 cases, in both directions together


def test_victims_that_share_their_candidates_move_together() -> None:
    """The same 50 non-members score higher in one run by chance, which lowers the AUC of all victims."""
    base, rate = dict.fromkeys(range(8), 0.60), {"metric": "tpr_at_1_in_100", "examples": 200}
    for change, verdict in ((-0.05, NOT_SHOWN), (0.05, NOT_SHOWN), (-0.2, LESS), (0.2, MORE)):
        other = {victim: value + change for victim, value in base.items()}
        found = one(rows(base, "membership_auc", examples=100), rows(other, "membership_auc", examples=100))
        assert found.verdict == verdict
        assert (found.low <= 0 <= found.high) == (verdict == NOT_SHOWN)
        found = one(rows(base, **rate), rows(other, **rate))
        assert found.verdict == NOT_SHOWN
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_the_fewer_candidates_of_two_runs_decide_in_either_order() -> None:
    many, few = dict.fromkeys(range(8), 0.60), dict.fromkeys(range(8), 0.75)
    many_rows, few_rows = rows(many, "membership_auc", examples=120), rows(few, "membership_auc", examples=12)
    found, reverse = one(many_rows, few_rows), one(few_rows, many_rows)
    assert found.verdict == reverse.verdict == NOT_SHOWN
    assert (found.low, found.high) == pytest.approx((-reverse.high, -reverse.low))


def test_equal_scores_are_equal_however_few() -> None:
    found = one(rows({0: 1.0, 1: 2.0}), rows({0: 1.0, 1: 2.0}))
    assert (found.is_equal, found.verdict, found.remark) == (True, EQUAL, "in 2 victims")
    assert explain_equality([found]) == "equal: all scores of sme, by 1 metric over 2 victims"


def test_scores_that_differ_and_have_the_same_mean_are_not_equal() -> None:
    base, other = ([*rows({0: a}), *rows({0: b}, round="2"), *rows({1: 5.0})] for a, b in ((1.0, 3.0), (3.0, 1.0)))
    found = one(base, other)
    assert (found.mean, found.is_equal, found.verdict) == (0.0, False, MIXED)
    assert explain_equality([found]) == ""


@pytest.mark.parametrize(
    "other",
    [
        rows({0: 1.0}),  # a victim less
        rows({0: 1.0, 1: 2.0}, missing="no network weights"),
        rows({0: 1.0, 1: 2.0}, instrument="squeeze"),
    ],
)
def test_runs_are_not_equal_where_one_has_no_such_score(other: list[dict[str, Any]]) -> None:
    same = differences(rows({0: 1.0, 1: 2.0}, "mse"), rows({0: 1.0, 1: 2.0}, "mse"))
    assert explain_equality(same)
    assert explain_equality([*same, one(rows({0: 1.0, 1: 2.0}), other)]) == ""


def test_what_neither_run_could_compute_does_not_count() -> None:
    lacking = one(rows({0: 1.0}, missing="no network weights"), rows({0: 1.0}, missing="no network weights"))
    assert explain_equality([lacking]) == ""
    assert explain_equality([lacking, one(rows({0: 1.0}, "mse"), rows({0: 1.0}, "mse"))]).startswith("equal: ")


def test_clients_that_hold_other_data_are_never_equal() -> None:
    assert not one(rows({0: 1.0}), rows({0: 1.0}), "federation.seed differs").is_equal


def test_victims_that_one_run_lacks_are_left_out() -> None:
    found = one(rows({0: 1.0, 1: 2.0, 2: 3.0}), rows({1: 3.0, 2: 2.0, 9: 50.0}))
    assert (found.count, found.mean, found.verdict) == (2, 0.0, MIXED)
    nobody = one(rows({0: 1.0}), rows({1: 2.0}))
    assert (nobody.count, nobody.verdict, nobody.remark) == (0, "", "no victim was attacked in both runs")
    assert math.isnan(nobody.mean)


def test_means_are_of_what_both_runs_attacked() -> None:
    base = dict.fromkeys(range(6), 10.0)
    found = one(rows(base | {6: 80.0}), rows({v: value + 2 for v, value in base.items()} | {9: -40.0}))
    assert (found.first, found.value, found.mean) == (10.0, 12.0, 2.0)
    assert found.base.mean == 20.0
    assert found.remark == "more in 6, less in 0 of 6 victims; without 2 scores that only one run has"


def test_two_perfect_claims_do_not_differ() -> None:
    base = dict.fromkeys(range(6), math.inf)
    found = one(rows(base), rows(base))
    assert (found.mean, found.verdict) == (0.0, EQUAL)
    worse = one(rows(base), rows(dict.fromkeys(range(6), 20.0)))
    assert (worse.mean, worse.verdict) == (-math.inf, LESS)
    assert math.isnan(worse.low)


def test_claims_that_are_exact_in_both_runs_do_not_differ() -> None:
    victims, exact = range(6), dict.fromkeys(range(6), 1.0)
    base = rows({victim: 147.0 - victim for victim in victims}) + rows(exact, metric="exact")
    other = rows({victim: 89.0 + victim for victim in victims}) + rows(exact, metric="exact")
    found = differences(base, other)[0]
    assert (found.mean, found.verdict) == (0, EQUAL)
    assert score_beside_floor(found.first, found.base) == "exact (guess 0)"
    other[0]["value"], other[6]["value"] = 20.0, 0.5
    found = differences(base, other)[0]
    assert found.mean == pytest.approx((20 - 147) / 6)


def test_other_clients_are_not_paired() -> None:
    base, other = {v: float(v) for v in range(8)}, {v: 100.0 + v for v in range(8)}
    found = one(rows(base), rows(other), "federation.seed differs")
    assert not found.paired
    assert (found.mean, found.verdict) == (100.0, MORE)
    assert found.low < 100 < found.high
    assert found.high - found.low > 4  # pairing them would give no width at all
    assert found.remark == "8 victims, not paired, since federation.seed differs"
    near = one(rows(base), rows({v: value + 0.5 for v, value in base.items()}), "federation.seed differs")
    assert near.verdict == NOT_SHOWN


@pytest.mark.parametrize(
    ("base", "other", "verdict"),
    [
        ([0.0] * 10, [1.0] * 10, MORE),
        ([1.0] * 10, [0.0] * 10, LESS),
        ([1.0] * 10, [1.0] * 10, NOT_SHOWN),
        ([20.0] * 10, [math.inf] * 10, MORE),
        ([20.0 + v for v in range(9)] + [math.inf], [20.5 + v for v in range(10)], NOT_SHOWN),
        ([math.inf] * 10, [math.inf] * 10, NOT_SHOWN),
        ([math.inf] * 9 + [20.0], [math.inf] + [20.0] * 9, LESS),
        ([0.0] * 9 + [1000.0], [1.0] * 10, "undecided"),
    ],
)
def test_without_an_interval_ranks_still_tell(base: list[float], other: list[float], verdict: str) -> None:
    found = one(rows(dict(enumerate(base))), rows(dict(enumerate(other))), "federation.seed differs")
    assert found.verdict == verdict
    closer = (rows(dict(enumerate(values)), higher=False) for values in (other, base))
    assert one(*closer, "federation.seed differs").verdict == verdict


def test_two_infinite_means_have_no_difference_to_show() -> None:
    base = rows(dict.fromkeys(range(6), math.inf))
    assert difference_text(one(base, base, "federation.seed differs")) == "–"
    assert difference_text(one(base, base)) == "0 ± 0"


def test_settings_and_grants_of_an_attack_that_differ_are_told() -> None:
    base = dict.fromkeys(range(6), 1.0)
    found = one(rows(base), rows(base, settings='{"iterations": 9}', granted="labels defenses", variant="w"))
    assert found.remark.endswith("; its settings differ; its granted facts differ")


def test_what_says_nothing_about_leakage_gets_no_verdict() -> None:
    base = dict.fromkeys(range(6), 1.0)
    assert (
        one(rows(base, "l_sim", higher=False), rows(dict.fromkeys(range(6), 0.1), "l_sim", higher=False)).verdict == ""
    )


def test_a_metric_that_one_run_could_not_compute_has_no_difference() -> None:
    missing = rows(dict.fromkeys(range(6), 1.0), missing="images are too small", value="nan")
    found = one(rows(dict.fromkeys(range(6), 1.0)), missing)
    assert (found.verdict, found.remark) == ("", "images are too small")
    assert math.isnan(found.mean)


def test_scores_by_different_networks_are_not_compared() -> None:
    scores = dict.fromkeys(range(6), 0.5)
    by_alex, by_squeeze = (rows(scores, "lpips", higher=False, instrument=name) for name in ("alex", "squeeze"))
    unlike = one(by_alex, by_squeeze)
    assert unlike.verdict == ""
    assert unlike.missing.startswith("measured with 'alex' in one run and with 'squeeze' in the other")
    assert unlike.remark == unlike.missing
    assert math.isnan(unlike.mean)
    alike = one(by_alex, by_alex)
    assert (alike.missing, alike.verdict) == ("", EQUAL)


def test_attacks_of_one_run_alone_are_named() -> None:
    base = rows({0: 1.0}) + rows({0: 1.0}, attack="spear-ica")
    assert unshared_attacks(base, rows({0: 1.0})) == (["spear-ica"], [])
    assert unshared_attacks(rows({0: 1.0}), base) == ([], ["spear-ica"])


def test_one_of_several_variants_is_compared_by_its_settings() -> None:
    ten, twenty = ({"variant": str(count), "settings": f'{{"iterations": {count}}}'} for count in (10, 20))
    base, other = rows({0: 1.0}, **ten), rows({0: 9.0}, **twenty) + rows({0: 3.0}, **ten)
    for found, mean in ((differences(base, other), 2.0), (differences(other, base), -2.0)):
        assert [(item.attack, item.mean) for item in found] == [("sme (iterations=10)", mean)]
    assert unshared_attacks(base, other) == ([], ["sme (iterations=20)"])
    assert incomparable_attacks(base, other) == []


def test_variants_that_no_settings_tell_apart_are_not_compared_and_not_called_missing() -> None:
    base = rows({0: 1.0}) + rows({0: 1.0}, attack="spear-ica")
    other = [
        row for count in ("10", "20") for row in rows({0: 1.0}, variant=count, settings=f'{{"iterations": {count}}}')
    ]
    assert differences(base, other) == []
    assert unshared_attacks(base, other) == (["spear-ica"], [])
    (sentence,) = incomparable_attacks(base, other)
    assert sentence.startswith("sme is not compared with sme (iterations=10), sme (iterations=20): ")


def test_a_metric_of_one_run_alone_is_told() -> None:
    values = dict.fromkeys(range(6), 2.0)
    base, other = rows(values) + rows(values, "ssim"), rows(values)
    assert incomparable_attacks(base, base) == []
    for first, second in ((base, other), (other, base)):
        assert [item.base.metric for item in differences(first, second)] == ["psnr"]
        assert incomparable_attacks(first, second) == ["sme has scores by SSIM in only one of the two runs."]


def test_metrics_that_are_not_known_or_that_differ_show_no_difference() -> None:
    values, more = dict.fromkeys(range(6), 2.0), dict.fromkeys(range(6), 3.0)
    unknown = one(rows(values, "their_error"), rows(more, "their_error"))
    assert (unknown.verdict, unknown.remark.partition(",")[0]) == ("", "metric 'their_error' is not installed here")
    turned = one(rows(values, "mse", higher=False), rows(more, "mse"))
    assert (turned.verdict, math.isnan(turned.mean)) == ("", True)
    assert turned.missing.startswith("higher values are better in one run and worse in the other")


def test_who_holds_what_follows_from_data_partition_seed_and_count() -> None:
    base = {"data.name": "digits", "federation.seed": 1, "federation.rounds": 2, "defense.0.name": "dp-sgd"}
    assert explain_other_clients(base, base | {"federation.rounds": 9, "defense.0.name": "mixup"}) == ""
    assert explain_other_clients(base, base | {"federation.seed": 2}) == "federation.seed differs"
    assert (
        explain_other_clients(base, base | {"data.name": "x", "partition.alpha": 1})
        == "data.name, partition.alpha differ"
    )
    assert explain_other_clients(base, None) == "the settings of a recording made elsewhere are not known"


def test_a_comparison_says_which_scores_are_in_doubt() -> None:
    base = rows(dict.fromkeys(range(6), 10.0))
    doubted = rows(dict.fromkeys(range(6), 12.0), doubt="its claims are in another unit; claim others")
    assert "in doubt" not in one(base, base).remark
    assert one(base, doubted).remark.endswith(
        "scores of a run are in doubt for 6 findings: its claims are in another unit"
    )
