"""A defense is judged by the same attack without it, paired by victim and seed, and by the worst metric."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedsim.report.adaptive import HOLDS, NOT_CONCLUDED, ONLY_NAIVE
from fedsim.report.attack_outcomes import judge_attacks
from fedsim.report.defense_outcomes import (
    NOTHING,
    WEAKENS,
    DefenseOutcome,
    attack_outcomes,
    read_scores,
)
from fedsim.report.exposed_victims import find_exposed_victim
from fedsim.report.paired_differences import subtract_control
from fedsim.report.sweep_groups import group_scores, paired_interval
from fedsim.report.undefended_leaks import explain_no_leak, find_main_metric
from tests.support.paired_seeds import measure_coverage, measure_false_falls
from tests.support.sweep_tables import AT_FLOOR, HALVED, LEAKING, make_both, make_rows

LOWER = [value - 0.5 for value in AT_FLOOR]
AXES = ("defense",)


def outcome(
    naive: Sequence[float], adaptive: Sequence[float] | None, control: Sequence[float] = LEAKING
) -> DefenseOutcome:
    """Return what a defense with these scores is worth."""
    rows = make_rows(naive, "noise")
    if adaptive is not None:
        rows += make_rows(adaptive, "noise", knows=True)
    [found] = attack_outcomes(rows, make_rows(control), "")
    return found


@pytest.mark.parametrize(
    ("naive", "adaptive", "word"),
    [
        (AT_FLOOR, LOWER, HOLDS),
        (AT_FLOOR, LEAKING, ONLY_NAIVE),
        (HALVED, HALVED, WEAKENS),
        (AT_FLOOR, AT_FLOOR, WEAKENS),  # the adaptive attack did as the naive one, so that nobody tried to get past it
        (LEAKING, LEAKING, NOTHING),
        (HALVED, LEAKING, NOTHING),  # the adversary may choose
        ([value + 2 for value in LEAKING], LEAKING, NOTHING),
        (LEAKING, None, NOTHING),
        (AT_FLOOR, None, NOT_CONCLUDED),  # only the naive attack was made
        (HALVED, None, NOT_CONCLUDED),
    ],
)
def test_the_outcome_follows_from_both_adversaries_and_the_control(
    naive: Sequence[float], adaptive: Sequence[float] | None, word: str
) -> None:
    assert outcome(naive, adaptive).word == word


def test_a_defense_that_holds_says_what_so_few_victims_leave_open() -> None:
    assert outcome(AT_FLOOR, LOWER).reason.endswith("6 victims do not exclude that up to 39 % of others are exposed")


def test_why_a_defense_does_not_hold_is_said() -> None:
    assert "no adaptive attack was tried" in outcome(AT_FLOOR, AT_FLOOR).reason
    assert "there is still a leak" in outcome(HALVED, HALVED).reason
    assert "only the naive attack ran; grant defenses = true" in outcome(HALVED, None).reason


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (AT_FLOOR, r"without the defense no leak is shown either \(no better than guessing\)"),
        (LEAKING[:3], "only 3 victims attacked, too few"),
    ],
)
def test_where_the_control_shows_no_leak_nothing_is_concluded(control: Sequence[float], words: str) -> None:
    found = outcome(AT_FLOOR[: len(control)], LOWER[: len(control)], control)
    assert found.word == NOT_CONCLUDED
    assert re.search(words, found.reason)


def test_without_a_control_the_reason_is_that_it_cannot_be_made() -> None:
    [found] = attack_outcomes(make_rows(AT_FLOOR, "noise"), [], "it reads tokens")
    assert (found.word, found.reason, found.difference) == (NOT_CONCLUDED, "it reads tokens", None)


def test_pairs_tell_what_means_do_not() -> None:
    """Victims differ by 30 dB, but each loses about 1 dB."""
    control = [20.0, 26.0, 32.0, 38.0, 44.0, 50.0]
    defended = [value - 1 + 0.1 * place for place, value in enumerate(control)]
    found = outcome(defended, defended, control)
    assert found.word == WEAKENS
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-0.75)
    assert found.difference.high < -0.5


def test_seeds_are_paired_with_their_own_control() -> None:
    controls = make_rows(LEAKING, seed=1) + make_rows([value + 20 for value in LEAKING], seed=2)
    rows = make_rows([value - 2 for value in LEAKING], "noise", seed=1)
    rows += make_rows([value + 18 for value in LEAKING], "noise", seed=2)
    [found] = attack_outcomes(rows, controls, "")
    assert found.difference is not None
    assert (found.difference.mean, found.difference.count) == (pytest.approx(-2), 12)


def test_an_interval_accounts_for_victims_and_seeds() -> None:
    by_seed = {(str(victim), str(seed)): -1.0 + 4 * seed + 0.1 * victim for victim in range(6) for seed in range(2)}
    low, high = paired_interval("psnr", by_seed)
    assert low < -0.75 < 3.25 < high  # two seeds that differ by 4 dB tell little, however many victims there are
    one_seed = {key: value for key, value in by_seed.items() if key[1] == "0"}
    assert paired_interval("psnr", one_seed)[1] < 0


def shares_of_two_seeds(changes: Sequence[Sequence[float]]) -> DefenseOutcome:
    """Return what a defense is worth by share identified that changes so much for each victim in each seed."""
    shares: dict[str, Any] = {"metric": "identified", "floor": 0.05, "examples": 10.0}
    rows, controls = [], []
    for seed, of_seed in enumerate(changes):
        controls += make_rows([0.9] * len(of_seed), seed=seed, **shares)
        defended = [0.9 + change for change in of_seed]
        rows += make_both({False: defended, True: defended}, "noise", seed=seed, **shares)
    [found] = attack_outcomes(rows, controls, "")
    return found


def test_what_two_seeds_show_alone_they_show_together() -> None:
    """All twelve pairs are lower; Student's interval over two seeds would reach from nothing to all."""
    found = shares_of_two_seeds([[-0.8, -0.5, -0.5, -0.6, -0.3, -0.5], [-0.2, -0.3, -0.3, -0.5, -0.3, -0.5]])
    assert found.difference is not None
    assert (found.difference.low, found.difference.high) == (
        pytest.approx(-0.70, abs=0.01),
        pytest.approx(-0.22, abs=0.01),
    )
    assert (found.word, found.leaks_with_defense) == (WEAKENS, True)


def test_where_two_seeds_disagree_they_are_too_few() -> None:
    found = shares_of_two_seeds([[-0.8, -0.5, -0.5, -0.6, -0.3, -0.5], [-0.1, 0.1, 0.0, -0.1, 0.1, 0.0]])
    assert (found.word, found.reason) == (
        NOT_CONCLUDED,
        "12 pairs in 2 seeds are too few to show whether leakage is lower than without the defense; add seeds",
    )
    [judged] = judge_attacks([found])
    assert judged.needs_seeds
    assert not judge_attacks([shares_of_two_seeds([[-0.5, -0.4] * 3] * 2)])[0].needs_seeds


@pytest.mark.parametrize(
    ("change", "spread", "word", "reason"),
    [
        (-0.2, 0.4, NOTHING, "leakage is at most 1 dB lower than without it"),
        (-0.6, 1.5, NOT_CONCLUDED, "6 pairs in 1 seed are too few to show whether"),
        (-0.6, 0.1, WEAKENS, "leakage is lower than without it"),
        (0.0, 0.0, NOTHING, "leakage is the same as without it"),
        (0.6, 0.1, NOTHING, "leakage is higher than without it"),
    ],
)
def test_nothing_is_said_only_of_differences_that_are_shown_to_be_small(
    change: float, spread: float, word: str, reason: str
) -> None:
    shifts = [-spread, spread] * 3
    values = [value + change + shift for value, shift in zip(LEAKING, shifts, strict=True)]
    found = outcome(values, values)
    assert found.word == word
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("seeds", "spread"),
    [
        (1, 0.0),
        pytest.param(2, 0.0, marks=pytest.mark.thorough),
        (2, 0.5),
        pytest.param(3, 0.5, marks=pytest.mark.thorough),
        (3, 2.0),
    ],
)
def test_intervals_of_differences_hold_the_mean_of_all_seeds(seeds: int, spread: float) -> None:
    coverage = measure_coverage(seeds, spread, draws=400)
    assert coverage.of_all >= 0.93
    assert coverage.less <= 0.05


@pytest.mark.parametrize(
    "spread", [pytest.param(0.0, marks=pytest.mark.thorough), pytest.param(1.0, marks=pytest.mark.thorough), 4.0]
)
def test_those_of_two_seeds_hold_the_mean_of_these_two_however_much_seeds_vary(spread: float) -> None:
    assert measure_coverage(2, spread, draws=400).of_these >= 0.97


def test_a_defense_that_does_nothing_is_seldom_said_to_weaken() -> None:
    """Its scores come from the distribution of those without it; one side of a 95 % interval errs in 2.5 % of cases."""
    generator = np.random.default_rng(0)
    num_less = 0
    for _ in range(400):
        shares = generator.binomial(12, 0.35, (2, 6)) / 12
        scores = [{(str(victim), "0"): float(share) for victim, share in enumerate(part)} for part in shares]
        difference = subtract_control("identified", scores[0], scores[1])
        assert difference is not None
        num_less += difference.is_less
    assert 0 < num_less <= 0.05 * 400


def test_several_metrics_are_no_more_chances_to_be_said_to_weaken() -> None:
    alone, corrected = measure_false_falls(seeds=1, spread=0.0, shared=0.0, draws=200)
    assert alone > 0.08
    assert 0 < corrected <= 0.04


@pytest.mark.parametrize(("ssim", "word"), [([0.76, 0.82, 0.76, 0.8, 0.76, 0.81], NOT_CONCLUDED), ([0.5] * 6, WEAKENS)])
def test_a_small_fall_by_one_of_several_metrics_may_be_chance(ssim: Sequence[float], word: str) -> None:
    controls, rows = make_rows(LEAKING), make_both({False: LEAKING, True: LEAKING}, "noise")
    controls += make_rows([0.8, 0.82, 0.81, 0.8, 0.79, 0.83], metric="ssim", floor=0.1)
    rows += make_both({False: ssim, True: ssim}, "noise", metric="ssim", floor=0.1)
    [judged] = judge_attacks(attack_outcomes(rows, controls, ""))
    assert judged.word == word
    assert judged.less_by == (() if word == NOT_CONCLUDED else ("SSIM",))
    if word == NOT_CONCLUDED:
        assert judged.reason.startswith("leakage is lower by SSIM, but with several metrics this may be chance")
        assert judged.needs_seeds


def test_equal_differences_of_shares_are_not_sure() -> None:
    low, high = paired_interval("identified", {(str(victim), "0"): -1.0 for victim in range(6)})
    assert (low, high) == (-1.0, pytest.approx(-0.08, abs=0.01))
    assert paired_interval("identified", {(str(victim), "0"): -0.5 for victim in range(2)})[1] > 0


def test_perfect_claims_are_paired_by_their_signs() -> None:
    perfect, found = {(str(v), "0"): math.inf for v in range(6)}, {(str(v), "0"): 20.0 for v in range(6)}
    less = subtract_control("psnr", found, perfect)
    assert less is not None
    assert less.is_less
    assert less.is_measured
    same = subtract_control("psnr", perfect, perfect)
    assert same is not None
    assert (same.mean, same.is_less, same.is_more) == (0.0, False, False)
    few = subtract_control("psnr", {("0", "0"): 20.0}, perfect)
    assert few is not None
    assert not few.is_measured


def test_lower_scores_that_leak_more_are_counted_towards_leakage() -> None:
    difference = subtract_control("mse", {("0", "0"): 0.3, ("1", "0"): 0.4}, {("0", "0"): 0.1, ("1", "0"): 0.1})
    assert difference is not None
    assert difference.mean == pytest.approx(-0.25)


def test_a_defense_does_not_pass_because_psnr_fell_while_examples_are_identified() -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "noise")
    rows += make_both({False: [0.5] * 6, True: [0.5] * 6}, "noise", metric="identified", floor=0.05, examples=10.0)
    controls = make_rows(LEAKING) + make_rows([0.5] * 6, metric="identified", floor=0.05, examples=10.0)
    outcomes = attack_outcomes(rows, controls, "")
    assert [(item.metric, item.word) for item in outcomes] == [("psnr", HOLDS), ("identified", NOTHING)]
    [judged] = judge_attacks(outcomes)
    assert (judged.word, judged.less_by, judged.still_by) == (WEAKENS, ("PSNR",), ("share identified",))
    assert judged.reason == "leakage is lower by PSNR, but there is still a leak by share identified"


def test_a_defense_does_something_where_psnr_fell_for_an_adversary_who_does_not_know_it() -> None:
    """As one that trains on noise in place of the data: an exact attack gets the noise, and the labels as before."""
    rows = make_rows(AT_FLOOR, "noise") + make_rows([0.5] * 6, "noise", metric="identified", floor=0.05, examples=10.0)
    controls = make_rows(LEAKING) + make_rows([0.5] * 6, metric="identified", floor=0.05, examples=10.0)
    outcomes = attack_outcomes(rows, controls, "")
    assert [(item.metric, item.word) for item in outcomes] == [("psnr", NOT_CONCLUDED), ("identified", NOTHING)]
    [judged] = judge_attacks(outcomes)
    assert (judged.decisive.metric, judged.word, judged.needs_seeds) == ("psnr", NOT_CONCLUDED, False)
    assert judged.reason.startswith("leakage is lower, but only the naive attack ran")


def test_a_metric_by_which_nothing_leaks_without_the_defense_does_not_count() -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "noise")
    rows += make_both({False: [0.05] * 6, True: [0.04] * 6}, "noise", metric="identified", floor=0.05)
    controls = make_rows(LEAKING) + make_rows([0.05] * 6, metric="identified", floor=0.05)
    [judged] = judge_attacks(attack_outcomes(rows, controls, ""))
    assert (judged.decisive.metric, judged.word) == ("psnr", HOLDS)


def test_the_worst_attack_comes_first() -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "noise") + make_rows(LEAKING, "noise", attack="dlg")
    controls = make_rows(LEAKING) + make_rows(LEAKING, attack="dlg")
    assert [(item.attack, item.word) for item in judge_attacks(attack_outcomes(rows, controls, ""))] == [
        ("dlg", NOTHING),
        ("sme", HOLDS),
    ]


def test_a_defense_does_not_hold_while_the_attack_leaks_by_a_metric_that_shows_nothing_without_it() -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "noise")
    rows += make_both({False: [0.9] * 6, True: [0.9] * 6}, "noise", metric="label_accuracy", floor=0.5)
    controls = make_rows(LEAKING) + make_rows([0.4] * 6, metric="label_accuracy", floor=0.5)
    outcomes = attack_outcomes(rows, controls, "")
    assert outcomes[1].reason == "the attack leaks with the defense, but is not shown to leak without it"
    [judged] = judge_attacks(outcomes)
    assert (judged.word, judged.less_by, judged.still_by) == (WEAKENS, ("PSNR",), ("label accuracy",))


def test_victims_on_whom_an_attack_failed_count_as_no_leak() -> None:
    failed = make_rows(LEAKING[:3], metric="", value="", better="")
    controls = make_rows(LEAKING[:5]) + [row | {"victim": f"1{row['victim']}", "floor": ""} for row in failed]
    [found] = attack_outcomes(make_rows(LEAKING[:5], "noise"), controls, "")
    assert found.control is not None
    assert found.control.reading.summary.num_missing == 3
    assert (found.word, found.reason) == (
        NOTHING,
        "the attack leaks with the defense, but is not shown to leak without it",
    )


def test_a_defense_does_not_hold_while_one_of_many_victims_is_got_back() -> None:
    """The mean of twenty, and its interval, is below the floor of 10 dB."""
    exposed = [25.0] + [7.0 + 0.01 * place for place in range(19)]
    rows = make_both({False: exposed, True: [value - 0.3 for value in exposed]}, "noise")
    [found] = attack_outcomes(rows, make_rows([15.0] * 20), "")
    assert found.word == WEAKENS
    assert "for victim 0 (round 1, seed 0) it is at least half" in found.reason
    identified: dict[str, Any] = {"metric": "identified", "floor": 0.01, "examples": 10.0, "floor_guess": "chance"}
    rows += make_both({False: [1.0] + [0.0] * 39, True: [0.9] + [0.0] * 39}, "noise", **identified)
    outcomes = attack_outcomes(rows, make_rows([15.0] * 20) + make_rows([1.0] * 40, **identified), "")
    assert outcomes[1].word == WEAKENS


def test_what_chance_gives_one_of_many_victims_exposes_nobody() -> None:
    generator = np.random.default_rng(0)
    aucs = generator.normal(0.5, 0.01, size=(2, 40))
    columns: dict[str, Any] = {"metric": "membership_auc", "floor": 0.5, "examples": 2000.0}
    rows = make_both({False: list(aucs[0]), True: list(aucs[1])}, "noise", **columns)
    [found] = attack_outcomes(rows, make_rows([0.55] * 40, **columns), "")
    assert found.word == HOLDS
    exposed = make_both({False: list(aucs[0]), True: [0.6, *aucs[1][1:]]}, "noise", **columns)
    [found] = attack_outcomes(exposed, make_rows([0.6] * 40, **columns), "")
    assert found.word == WEAKENS


@pytest.mark.parametrize(("others", "is_exposed"), [(0, True), (39, False)])
def test_what_exposes_a_single_victim_may_be_chance_among_many(others: int, is_exposed: bool) -> None:
    """Chance identifies three of ten examples in 1 % of cases."""
    columns: dict[str, Any] = {"metric": "identified", "floor": 0.05, "examples": 10.0, "floor_guess": "chance"}
    rows = make_rows([0.3] + [0.0] * others, "noise", **columns)
    found = find_exposed_victim("identified", rows, make_rows([0.35] * (others + 1), **columns))
    assert bool(found) == is_exposed


@pytest.mark.parametrize(("seeds", "rate", "word"), [(1, 0.012, HOLDS), (3, 0.012, HOLDS), (3, 0.03, WEAKENS)])
def test_a_rate_holds_within_what_so_many_members_and_one_threshold_give(seeds: int, rate: float, word: str) -> None:
    """Gaffke's interval of six rates of 1 % reaches 40 %, and chance spreads an AUC more than twice as far."""
    columns: dict[str, Any] = {"metric": "tpr_at_1_in_100", "floor": 21 / 2001, "examples": 4000.0}
    rows, controls = [], []
    for seed in range(seeds):
        controls += make_rows([0.2, 0.21, 0.19, 0.2, 0.22, 0.18], seed=seed, **columns)
        naive = [rate + change for change in (0.0, 0.002, -0.002, 0.001, -0.001, 0.0)]
        rows += make_both({False: naive, True: [value - 0.001 for value in naive]}, "noise", seed=seed, **columns)
    [found] = attack_outcomes(rows, controls, "")
    assert found.word == word


def test_why_few_seeds_tell_nothing_of_a_rate_is_said() -> None:
    columns: dict[str, Any] = {"metric": "tpr_at_1_in_100", "floor": 6 / 501, "examples": 1000.0}
    rows = make_both({False: [0.1] * 6, True: [0.11] * 6}, "noise", **columns)
    [found] = attack_outcomes(rows, make_rows([0.2] * 6, **columns), "")
    assert (found.word, found.reason.endswith("add seeds")) == (NOT_CONCLUDED, True)


def test_knowing_the_defense_is_seen_by_any_metric() -> None:
    """No claim is exact by either adversary, though they claim other images."""
    exact: dict[str, Any] = {"metric": "exact", "floor": 0.0, "examples": 20.0, "floor_guess": "chance"}
    rows = make_both({False: AT_FLOOR, True: LOWER}, "noise")
    rows += make_both({False: [0.0] * 6, True: [0.0] * 6}, "noise", **exact)
    controls = make_rows(LEAKING) + make_rows([1.0] * 6, **exact)
    assert [item.word for item in attack_outcomes(rows, controls, "")] == [HOLDS, HOLDS]


def test_a_defense_holds_only_for_victims_of_whom_something_leaks_without_it() -> None:
    rows = []
    for row in make_both({False: AT_FLOOR, True: LOWER}, "noise"):
        rows.append(row | {"victim": row["victim"] if int(row["victim"]) < 3 else f"9{row['victim']}"})
    [found] = attack_outcomes(rows, make_rows(LEAKING), "")
    assert (found.word, "only 3 victims were attacked with it and without" in found.reason) == (WEAKENS, True)


def test_a_defense_on_which_attacks_fail_does_not_do_nothing() -> None:
    shares: dict[str, Any] = {"metric": "identified", "floor": 0.01, "examples": 10.0, "floor_guess": "chance"}
    controls = make_rows([1.0, 0.9, 1.0, 0.9, 1.0, 1.0] * 3, **shares)
    rows = make_both({False: [1.0, 0.9, 1.0, 0.9, 1.0, 1.0], True: [1.0, 0.9, 1.0, 0.9, 1.0, 1.0]}, "noise", **shares)
    [found] = attack_outcomes(rows, controls[:6], "")
    assert found.word == NOTHING
    for knows in (0, 1):  # on the twelve others the attack finds nothing to work with
        failed = make_rows([0.0] * 18, "noise", metric="", knows=bool(knows))
        rows += [row | {"value": "", "floor": ""} for row in failed[6:]]
    [found] = attack_outcomes(rows, controls, "")
    assert found.word == NOT_CONCLUDED


def test_a_margin_is_no_larger_than_a_fifth_of_what_leaks() -> None:
    """Of 0.04 beyond the guess, up to 0.03 may be gone."""
    columns: dict[str, Any] = {"metric": "label_accuracy", "floor": 0.5, "examples": 1000.0}
    control, change = [0.54, 0.55, 0.53, 0.54, 0.53, 0.55], [-0.03, 0.01, -0.02, 0.01, -0.02, 0.0]
    defended = [value + step for value, step in zip(control, change, strict=True)]
    [found] = attack_outcomes(
        make_both(dict.fromkeys((False, True), defended), "noise", **columns), make_rows(control, **columns), ""
    )
    assert (found.leaks_with_defense, found.word) == (True, NOT_CONCLUDED)


@pytest.mark.parametrize(("attacked", "word"), [("1", WEAKENS), ("1-2+5", WEAKENS), ("1-5 by 2", HOLDS)])
def test_a_defense_that_leaves_rounds_open_holds_only_where_one_was_attacked(attacked: str, word: str) -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "censor", round=attacked)
    [found] = attack_outcomes(rows, make_rows(LEAKING, round=attacked), "", open_rounds=(3, 4))
    assert found.word == word
    assert (word == HOLDS) != ("it does not act in round 3" in found.reason)


def test_an_open_round_that_leaks_is_not_averaged_away() -> None:
    rows = [
        row
        for number in range(1, 11)
        for row in make_both({False: [14.0] * 6 if number == 10 else AT_FLOOR, True: LOWER}, "censor", round=number)
    ]
    controls = [row for number in range(1, 11) for row in make_rows(LEAKING, round=number)]
    [found] = attack_outcomes(rows, controls, "", open_rounds=(10,))
    assert found.naive is not None
    assert found.naive.reading.summary.high < 10.0
    assert (found.word, "(round 10, seed 0)" in found.reason) == (WEAKENS, True)


def test_that_nothing_leaks_without_a_defense_is_said_with_what_to_change() -> None:
    text = explain_no_leak(make_rows(AT_FLOOR) + make_rows(LEAKING, "noise"), AXES)
    assert text.startswith("without a defense no attack shows a leak (sme; 6 victims)")
    for words in ("attack more victims", "fewer local steps", "another attack", "more iterations"):
        assert words in text
    assert explain_no_leak(make_rows(AT_FLOOR) + make_rows(LEAKING, attack="dlg"), AXES) == ""
    assert explain_no_leak(make_rows(LEAKING, "noise"), AXES) == ""  # no control has scores


def test_leakage_is_shown_by_the_first_metric_by_which_something_leaks() -> None:
    unseen = make_rows(AT_FLOOR)
    identified = make_rows([0.5] * 6, metric="identified", floor=0.05, examples=10.0)
    assert find_main_metric(unseen + identified, AXES) == "identified"
    assert find_main_metric(make_rows(LEAKING) + identified, AXES) == "psnr"
    assert find_main_metric(unseen, AXES) == "psnr"
    assert find_main_metric([], AXES) == ""


def test_a_mean_has_one_interval_on_the_whole_page() -> None:
    rows = [
        row for seed in range(3) for row in make_rows([12.0 + 3 * seed, 15.0 + 3 * seed, 17.0 + 2 * seed], seed=seed)
    ]
    scores = read_scores(rows, "psnr", adaptive=False)
    [group] = group_scores(rows, ("defense",), "psnr")
    assert scores is not None
    assert scores.reading.summary.interval_text == group.text


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_candidates_that_victims_share_are_no_fall(seeds: int) -> None:
    """A defense does nothing, and the same non-members score as they do by chance with it and without it."""
    draw, runs, num_less = np.random.default_rng(0), 30, 0
    for _ in range(runs):
        aucs = np.empty((2, seeds, 8))
        for place in np.ndindex(2, seeds):
            scores, non_members = draw.normal(0.7, 1.0, (8, 100)), np.sort(draw.normal(size=100))
            aucs[place] = np.searchsorted(non_members, scores).mean(1) / 100
        columns: dict[str, Any] = {"metric": "membership_auc", "floor": 0.5, "examples": 200.0}
        rows, controls = [], []
        for seed in range(seeds):
            controls += make_rows(list(aucs[0, seed]), seed=seed, **columns)
            rows += make_both({knows: list(aucs[1, seed]) for knows in (False, True)}, "noise", seed=seed, **columns)
        [found] = attack_outcomes(rows, controls, "")
        num_less += found.word == WEAKENS
    assert num_less <= 0.025 * runs + 2.5 * (0.025 * 0.975 * runs) ** 0.5


@pytest.mark.parametrize(("rounded", "word"), [([147.0, 89.0, 90.0, 88.0, 91.0, 87.0], NOTHING), ([30.0] * 6, WEAKENS)])
def test_claims_that_are_exact_on_both_sides_are_no_difference(rounded: list[float], word: str) -> None:
    """Rounding to six decimals leaves 89 dB of 147, and each example exact."""
    share = float(min(rounded) > 40)
    controls = make_rows([147.0] * 6) + make_rows([1.0] * 6, metric="exact", floor=0.0)
    rows = make_both({False: rounded, True: [value + 0.01 for value in rounded]}, "rounding")
    rows += make_both({False: [share] * 6, True: [share] * 6}, "rounding", metric="exact", floor=0.0)
    found = next(item for item in attack_outcomes(rows, controls, "") if item.metric == "psnr")
    assert found.word == word, found.reason
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(0.0 if word == NOTHING else 30.01 - 147)
    assert found.means_text.startswith("exact without, exact with" if word == NOTHING else "exact without, 30 with")
