"""Verdicts: what chance alone is hardly ever called a leak, and what is one from one victim on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.audit.evaluation.inferences import AttributeAccuracy
from fedsim.audit.evaluation.label_distributions import score_distribution
from fedsim.audit.evaluation.matches import CHANCE
from fedsim.audit.evaluation.score import Score
from fedsim.report.adaptive import at_floor
from fedsim.report.recovery import describe_recovery
from fedsim.report.summary import summarise
from fedsim.report.verdicts import (
    GUESSING,
    LEAKS,
    UNDECIDED,
    WORSE_THAN_IMPUTATION,
    judge_summary,
    score_readings,
)
from tests.support.silent_messages import KINDS, count_false_leaks, row_of


@pytest.mark.parametrize("victims", [1, 5, *(pytest.param(count, marks=pytest.mark.thorough) for count in (2, 10, 20))])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_say_nothing_hardly_ever_leak(kind: str, victims: int) -> None:
    runs = 60 if kind.startswith("`identified`") else 200
    # Two and a half standard deviations of the simulation above 5 %.
    assert count_false_leaks(kind, victims, runs) <= 0.05 * runs + 2.5 * (0.05 * 0.95 * runs) ** 0.5


def judge(metric: str, *scores: tuple[float, float, int], **columns: Any) -> tuple[str, str]:
    """Judge victims of these values, floors, and numbers of examples."""
    rows = []
    for victim, (value, floor, examples) in enumerate(scores):
        score = Score.against_guesses(metric, value, {CHANCE: floor})
        rows.append(row_of(score, victim, examples) | columns)
    (summary,) = summarise(rows)
    return judge_summary(summary)


def test_one_exact_example_of_one_victim_leaks() -> None:
    assert judge("exact", (0.1, 0.0027, 10)) == (LEAKS, "1 of 10 examples, 0.027 expected by chance")
    assert judge("recovered", (1.0, 0.04, 1))[0] == LEAKS
    assert judge("recovered", (1.0, 0.06, 1))[0] == UNDECIDED


def test_matches_are_counted_over_victims() -> None:
    """37 of 80 images can be picked out; each victim alone shows little."""
    victims = [(4 / 10, 0.2, 10)] * 5 + [(6 / 10, 0.2, 10)] * 2 + [(5 / 10, 0.2, 10)]
    assert judge("identified", victims[0])[0] == UNDECIDED
    assert judge("identified", *victims) == (LEAKS, "37 of 80 examples, 16 expected by chance")
    assert judge("identified", *[(0.2, 0.2, 10)] * 8)[0] == GUESSING


def test_a_leak_of_one_victim_is_named_where_the_sum_hides_it() -> None:
    remark = "1 of 16 examples, 0.64 expected by chance; of one victim 1 of 8, 0.0024 expected"
    assert judge("recovered", (0.125, 0.0003, 8), (0.0, 0.08, 8)) == (LEAKS, remark)


def test_rounds_and_starts_of_one_victim_are_about_the_same_examples() -> None:
    rows = [row_of(Score.against_guesses("identified", 0.3, {CHANCE: 0.1}), 0, 10) for _ in range(6)]
    (summary,) = summarise([row | {"round": number} for number, row in enumerate(rows)])
    assert judge_summary(summary) == (UNDECIDED, "3 of 10 examples, 1 expected by chance")


@pytest.mark.parametrize("share", [torch.full((62,), 1 / 62), torch.full((62,), (1 - 5e-5) / 62)])
def test_a_guess_with_rounding_errors_is_no_better_than_itself(share: torch.Tensor) -> None:
    """Each share is a little too small, which is nearer to the many classes that a client lacks."""
    rows = []
    for victim in range(6):
        labels = torch.randint(62, (8,), generator=torch.Generator().manual_seed(victim))
        distance = score_distribution(share, labels, None)[0]
        rows.append(row_of(distance, victim, 8))
    (summary,) = summarise(rows)
    assert judge_summary(summary) == (GUESSING, "0 of 6 victims beyond the floor")


def test_a_rounding_error_in_favour_of_each_claim_is_no_leak() -> None:
    assert judge("label_distance", *[(0.5 - 1e-8, 0.5, 8)] * 6) == (GUESSING, "0 of 6 victims beyond the floor")
    assert judge("label_distance", *[(0.5 - 1e-4, 0.5, 8)] * 6)[0] == LEAKS


def test_without_others_to_match_five_victims_decide() -> None:
    """A guess that matches something is no measure of chance."""
    assert judge("exact", *[(1.0, 0.0, 3)] * 4, floor_guess="noise")[0] == "beyond the floor"
    assert judge("exact", *[(1.0, 0.0, 3)] * 5, floor_guess="noise")[0] == LEAKS
    assert judge("recovered", *[(0.4, 0.1, 10)] * 3, floor_guess="mid-grey")[0] == "beyond the floor"


def test_all_examples_of_a_victim_beside_too_few_others_say_so() -> None:
    assert judge("exact", (1.0, 0.1, 100)) == (
        UNDECIDED,
        "100 of 100 examples, 10 expected by chance, too few examples of others for a verdict",
    )


def test_two_infinite_scores_are_no_reason_for_no_verdict() -> None:
    assert judge("psnr", *[(30.0, 10.0, 10)] * 12, (math.inf, math.inf, 10))[0] == LEAKS


def test_one_victim_with_many_candidates_leaks() -> None:
    assert judge("membership_auc", (0.6, 0.5, 2000)) == (LEAKS, "2000 candidates of 1 victim")
    assert judge("membership_auc", (0.6, 0.5, 20))[0] == UNDECIDED
    assert judge("membership_auc", *[(0.6, 0.5, 200)] * 20)[0] == LEAKS
    assert judge("membership_accuracy", (0.49, 0.5, 2000))[0] == GUESSING


def test_scores_that_are_lower_for_members_are_not_taken_for_guesses() -> None:
    """An attack that hands in losses says nearly all, the wrong way round."""
    for metric, victims in (("membership_auc", [(0.18, 0.5, 16)] * 4), ("membership_accuracy", [(0.45, 0.5, 2000)])):
        verdict, remark = judge(metric, *victims)
        assert verdict == UNDECIDED
        assert "the scores seem reversed: a higher one has to mean likelier" in remark
    assert judge("membership_auc", *[(0.45, 0.5, 16)] * 4)[0] == GUESSING


@pytest.mark.parametrize(("victims", "members"), [(20, 50), (5, 50), (10, 100)])
def test_victims_that_share_their_non_members_hardly_ever_leak(victims: int, members: int) -> None:
    """Scores depend on the record alone, and all victims are compared with the same records."""
    draw, runs, leaks, leaks_by_rate = np.random.default_rng(0), 200, 0, 0
    for _ in range(runs):
        non_members = draw.normal(size=members)
        aucs, rates = [], []
        for _ in range(victims):
            scores = draw.normal(size=members)
            aucs.append((float((scores[:, None] > non_members).mean()), 0.5, 2 * members))
            highest = np.sort(non_members)[-1 - members // 100]
            rates.append((float((scores > highest).mean()), (members // 100 + 1) / (members + 1), 2 * members))
        leaks += judge("membership_auc", *aucs)[0] == LEAKS
        leaks_by_rate += judge("tpr_at_1_in_100", *rates)[0] == LEAKS
    assert max(leaks, leaks_by_rate) <= 0.05 * runs + 2.5 * (0.05 * 0.95 * runs) ** 0.5


def test_members_found_at_few_false_alarms_leak_from_one_victim_on() -> None:
    assert judge("tpr_at_1_in_100", (0.2, 2 / 101, 200))[0] == LEAKS
    assert judge("tpr_at_1_in_100", (0.03, 2 / 101, 200))[0] == UNDECIDED
    assert judge("tpr_at_1_in_100", *[(0.03, 2 / 101, 200)] * 20)[0] == UNDECIDED  # the threshold may be all victims'


def test_victims_without_a_score_count_as_those_that_leak_nothing() -> None:
    rows = [row_of(Score.against_guesses("identified", 0.4, {CHANCE: 0.015}), 0, 10)]
    rows += [row_of(Score.from_reason("identified", "no reason"), victim, 10) for victim in (1, 2, 3)]
    (alone,), (summary,) = summarise(rows[:1]), summarise(rows)
    assert judge_summary(alone)[0] == LEAKS
    verdict, remark = judge_summary(summary)
    assert verdict == UNDECIDED
    assert remark == "4 of 40 examples, 0.6 expected by chance; not computed for 3 victims: no reason"


def describe_matches(metric: str, *scores: tuple[float, float, int], **columns: Any) -> str:
    rows = []
    for victim, (value, floor, examples) in enumerate(scores):
        rows.append(row_of(Score.against_guesses(metric, value, {CHANCE: floor}), victim, examples) | columns)
    return describe_recovery(score_readings(rows, {}), "images")


def test_a_lay_reader_is_told_how_many_examples_came_back_and_how_well() -> None:
    assert describe_matches("exact", *[(1.0, 0.02, 10)] * 5) == (
        "From the messages of 5 victims, the server recovered all 50 images exactly (by a)."
    )
    assert describe_matches("identified", (0.4, 0.02, 10), (0.8, 0.02, 5)) == (
        "From the messages of 2 victims, the server identified 8 of 15 images among examples of others, where chance "
        "would give fewer than one (by a)."
    )
    assert describe_matches("exact", *[(0.4, 0.1, 10)] * 5) == (
        "From the messages of 5 victims, the server recovered 20 of 50 images exactly, where chance would give about "
        "5 (by a)."
    )
    assert describe_matches("recovered", (0.1, 0.09, 10)) == ""
    assert describe_matches("psnr", *[(30.0, 10.0, 10)] * 5) == ""


def describe_by_metrics(**scores: tuple[float, float]) -> str:
    """Say what was recovered of 36 images of 6 victims, by the share of each metric and that by chance."""
    rows = []
    for metric, (value, floor) in scores.items():
        for victim in range(6):
            rows.append(row_of(Score.against_guesses(metric, value, {CHANCE: floor}), victim, 6))
    return describe_recovery(score_readings(rows, {}), "images")


def test_the_metric_that_gives_most_away_is_told_first_and_better_ones_after_it() -> None:
    assert describe_by_metrics(recovered=(0.5, 0.001), identified=(5 / 6, 0.02)) == (
        "From the messages of 6 victims, the server identified 30 of 36 images among examples of others, where chance "
        "would give fewer than one (by a); and recovered 18 of 36 recognisably (by a)."
    )
    assert describe_by_metrics(exact=(0.5, 0.001), recovered=(0.5, 0.001), identified=(0.5, 0.02)) == (
        "From the messages of 6 victims, the server recovered 18 of 36 images exactly (by a)."
    )


def test_chance_is_not_counted_as_what_a_metric_gives_away() -> None:
    sentence = describe_by_metrics(recovered=(0.8, 0.001), identified=(5 / 6, 0.16))
    assert sentence.startswith("From the messages of 6 victims, the server recovered 28 of 36 images recognisably")
    assert "others" not in sentence
    sentence = describe_by_metrics(identified=(5 / 6, 0.18))
    assert "identified 30 of 36 images among examples of others, where chance would give 6 or 7" in sentence


def test_of_several_rounds_of_a_client_the_best_is_told() -> None:
    rows = []
    for number, value in enumerate((0.5, 0.79)):
        rows.append(row_of(Score.against_guesses("exact", value, {CHANCE: 0.01}), 0, 10) | {"round": number})
    assert describe_recovery(score_readings(rows, {}), "texts") == (
        "From the messages of 1 victim, in one of them, the server recovered 7 of 10 texts exactly (by a)."
    )


def test_texts_come_back_word_for_word() -> None:
    rows = [row_of(Score.against_guesses("recovered", 1.0, {CHANCE: 0.02}), victim, 4) for victim in range(4)]
    assert describe_recovery(score_readings(rows, {}), "texts", are_texts=True) == (
        "From the messages of 4 victims, the server recovered all 16 texts word for word (by a)."
    )


def is_at_floor(metric: str, *scores: tuple[float, float, int], missing: int = 0) -> bool:
    rows = [
        row_of(Score.against_guesses(metric, value, {CHANCE: floor}), victim, examples)
        for victim, (value, floor, examples) in enumerate(scores)
    ]
    rows += [row_of(Score.from_reason(metric, "no reason"), 100 + number, 1) for number in range(missing)]
    (summary,) = summarise(rows)
    return at_floor(summary)


def test_candidates_in_doubt_are_no_proof_of_a_leak_and_matches_in_doubt_are() -> None:
    doubt = {"doubt": "attack, client 0: candidates differ in more than membership"}
    verdict, remark = judge("membership_auc", (0.9, 0.5, 2000), **doubt)
    assert verdict == UNDECIDED
    assert "in doubt for 1 finding: attack, client 0: candidates differ" in remark
    assert judge("membership_auc", (0.4, 0.5, 2000), **doubt)[0] == UNDECIDED  # reversed
    assert judge("exact", (0.1, 0.0027, 10), **doubt)[0] == LEAKS


def test_candidates_ranked_worse_than_by_chance_are_not_at_the_floor() -> None:
    """Who turns the order round leaks as much."""
    near_half = [(0.5 + shift, 0.5, 2000) for shift in (-0.02, -0.01, 0.0, 0.01, 0.02)]
    assert is_at_floor("membership_auc", *near_half)
    assert not is_at_floor("membership_auc", *[(value - 0.4, floor, count) for value, floor, count in near_half])
    assert not is_at_floor("membership_auc", *[(value + 0.2, floor, count) for value, floor, count in near_half])


def test_candidates_that_victims_may_share_are_counted_once() -> None:
    """Twenty victims with 100 members tell no more of the 100 others than one does, whose AUC varies by 0.06."""
    scores = [(0.47 + 0.003 * number, 0.5, 200) for number in range(20)]
    assert not is_at_floor("membership_auc", *scores)
    assert is_at_floor("membership_auc", *[(value, floor, 10 * count) for value, floor, count in scores])


def test_few_matches_among_many_examples_are_at_the_floor() -> None:
    assert is_at_floor("identified", *[(0.0, 0.01, 10)] * 20)
    assert not is_at_floor("identified", *[(0.0, 0.01, 1)] * 20)
    assert not is_at_floor("identified", *[(0.3, 0.01, 10)] * 20)


def test_where_victims_have_no_score_nothing_is_at_the_floor() -> None:
    scores = [(9.0 + shift, 10.0, 5) for shift in (0.0, 0.1, 0.2, 0.3, 0.1, 0.2)]
    assert is_at_floor("psnr", *scores)
    assert not is_at_floor("psnr", *scores, missing=18)


def test_the_explanation_of_attributes_names_the_verdict_as_reports_do() -> None:
    (explanation,) = AttributeAccuracy.explanations
    assert f"“{WORSE_THAN_IMPUTATION.capitalize()}” means" in explanation
