"""Naive and adaptive attacks side by side: what is said of a defense is what the numbers carry."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedsim.cli import work_shown
from fedsim.federation.experiment import Experiment
from fedsim.report.adaptive import (
    FAILS,
    HOLDS,
    NOT_CONCLUDED,
    ONLY_NAIVE,
    NaiveAdaptivePair,
    defense_remarks,
    equal_attacks,
    merge_equal_attacks,
    pair_readings,
    remarks,
)
from fedsim.report.verdicts import AttackTraits, ScoreReading, score_readings
from tests.support.experiments import make_attack_file, make_tiny_config
from tests.support.score_rows import make_score

HELD = [9.0, 9.5, 9.2, 9.4, 9.1]
LEAKING = [15.0, 16.0, 15.5, 14.5, 15.2]
LOWER = [value - 0.5 for value in HELD]
BETWEEN = [8.0, 12.0, 9.0, 12.5, 7.0]
"""Scores of five victims, whose floor is 10."""


def rows(values: Sequence[float], *, knows: bool, title: str = "sme", **keys: Any) -> list[dict[str, Any]]:
    """Of `scores.csv`, one a victim."""
    about = {
        "attack": f"{title} adaptive" if knows else title,
        "variant": "ad" if knows else "na",
        "granted": "model loss defenses" if knows else "model loss",
    }
    return [make_score(value, victim=victim, **about | keys) for victim, value in enumerate(values)]


def make_readings(naive: Sequence[float], adaptive: Sequence[float], **keys: Any) -> list[ScoreReading]:
    return score_readings([*rows(naive, knows=False, **keys), *rows(adaptive, knows=True, **keys)], {})


def pair_of(naive: Sequence[float], adaptive: Sequence[float], **keys: Any) -> NaiveAdaptivePair:
    [pair] = pair_readings(make_readings(naive, adaptive, **keys))
    return pair


@pytest.mark.parametrize(
    ("naive", "adaptive", "outcome", "told"),
    [
        (HELD, HELD, NOT_CONCLUDED, "the adaptive attack has the results of the naive one"),
        (
            HELD,
            LOWER,
            NOT_CONCLUDED,
            "neither attack is beyond the floor, but it is unknown whether it is without the defense",
        ),
        (HELD, LEAKING, ONLY_NAIVE, "beats only the naive attack"),
        (LEAKING, LEAKING, FAILS, "does not hold: both attacks leak"),
        (LEAKING, HELD, FAILS, "does not hold: the naive attack leaks"),
        (BETWEEN, LEAKING, FAILS, "does not hold: the adaptive attack leaks"),
        (HELD, BETWEEN, NOT_CONCLUDED, "neither attack leaks, but"),
        (BETWEEN, HELD, NOT_CONCLUDED, "neither attack leaks, but"),
        (HELD[:4], HELD[:4], NOT_CONCLUDED, "fewer than 5 victims are too few"),
        (HELD[:4], LEAKING[:4], NOT_CONCLUDED, "fewer than 5 victims"),
        ([*HELD[:4], math.inf], HELD, NOT_CONCLUDED, ""),
    ],
)
def test_a_defense_is_worth_what_both_attacks_say(
    naive: list[float], adaptive: list[float], outcome: str, told: str
) -> None:
    pair = pair_of(naive, adaptive)
    assert pair.outcome == outcome
    start = "nothing is concluded about the clients' defense: " if outcome == NOT_CONCLUDED else "the clients' defense "
    assert f"Against sme, by PSNR, {start}{told}" in pair.sentence


def test_a_defense_holds_only_where_the_attack_leaks_without_it_and_somebody_tried_to_get_past_it() -> None:
    pair, without = pair_of(HELD, LOWER), pair_of(LEAKING, LEAKING).naive
    held = replace(pair, control=without)
    assert held.outcome == HOLDS
    assert "holds: neither the naive nor the adaptive attack is beyond the floor" in held.sentence
    useless = replace(pair, control=pair_of(HELD, HELD).naive)
    assert useless.outcome == NOT_CONCLUDED
    assert "the same attack does not leak without the defense either" in useless.sentence
    assert replace(pair_of(HELD, HELD), control=without).outcome == NOT_CONCLUDED


def test_it_is_said_by_which_scores() -> None:
    assert pair_of(HELD, LEAKING).sentence.endswith(
        "the adaptive one leaks; naive 9.24 (95 % interval 8.98 to 9.5), adaptive 15.24 (95 % interval 14.5 to 15.9), "
        "floor 10, n = 5."
    )


def test_where_less_is_more_leakage_the_other_end_of_the_interval_counts() -> None:
    naive, adaptive = LEAKING, [value + 0.5 for value in LEAKING]
    control = pair_of(HELD, HELD, higher_is_better=False).naive
    assert replace(pair_of(naive, adaptive, higher_is_better=False), control=control).outcome == HOLDS
    assert pair_of(HELD, HELD, higher_is_better=False).outcome == FAILS


def test_an_interval_that_reaches_beyond_the_floor_is_no_proof() -> None:
    """The mean is below the floor and no victim leaks by the sign test, but four more might."""
    values = [9.9, 10.1, 9.7, 10.2, 9.8]
    assert sum(values) / 5 < 10
    assert pair_of(values, values).outcome == NOT_CONCLUDED


def test_differences_are_paired_by_victim() -> None:
    pair = pair_of([1.0, 20.0, 300.0, 40.0, 5.0], [2.0, 21.0, 301.0, 41.0, 6.0])
    assert pair.differences == [1.0] * 5
    assert pair.difference_text == "1 ± 0"
    missing = score_readings([*rows(HELD, knows=False), *rows(HELD[1:], knows=True)[1:]], {})
    assert len(pair_readings(missing)[0].differences) == 3  # victims 1 to 3 were attacked both ways


def test_differences_of_shares_stay_between_minus_one_and_one() -> None:
    pair = pair_of([0.0] * 5, [1.0] * 5, metric="label_accuracy", floor=0.1)
    assert pair.difference_text.startswith("1 (")
    assert pair.difference_text.endswith(" to 1)")


def test_equal_scores_say_that_knowing_the_defense_changes_nothing() -> None:
    assert pair_of(LEAKING, LEAKING).sentence.endswith("knowing the defense has no effect.")
    assert "changes nothing" not in pair_of(LEAKING, LEAKING[::-1]).sentence


@pytest.mark.parametrize(
    "keys", [{"settings": '{"iterations": 3}'}, {"metric": "ssim"}, {"attack": "other adaptive"}], ids=lambda k: min(k)
)
def test_only_the_same_attack_is_a_pair(keys: dict[str, Any]) -> None:
    found = score_readings([*rows(HELD, knows=False), *(row | keys for row in rows(HELD, knows=True))], {})
    assert pair_readings(found) == []


def test_an_adversary_who_is_granted_more_than_the_defenses_is_no_pair() -> None:
    """That its attack leaks may be due to what else it knows, and says nothing of the defense."""
    more = [row | {"granted": "model loss labels defenses"} for row in rows(LEAKING, knows=True)]
    found = score_readings([*rows(HELD, knows=False), *more], {})
    assert pair_readings(found) == []
    assert not [told for told in remarks(found, defended=True, granted=True) if "beats only" in told]


def test_an_attack_that_is_called_adaptive_and_knows_no_defense_is_no_pair() -> None:
    named = [row | {"granted": "model loss"} for row in rows(LEAKING, knows=True)]
    assert pair_readings(score_readings([*rows(HELD, knows=False), *named], {})) == []


def test_what_is_not_computed_has_no_outcome_and_is_not_told() -> None:
    gone = {"missing": "no weights", "value": math.nan, "floor": math.nan}
    found = score_readings([*rows(HELD, knows=False), *(row | gone for row in rows(HELD, knows=True))], {})
    assert pair_readings(found)[0].outcome == ""
    assert pair_readings(found)[0].difference_text == "–"
    assert remarks(found, defended=True, granted=True) == []


def test_baselines_are_no_attacks() -> None:
    source = {("sme", "na"): AttackTraits(source="global"), ("sme adaptive", "ad"): AttackTraits(source="global")}
    found = score_readings([*rows(HELD, knows=False), *rows(LEAKING, knows=True)], source)
    assert pair_readings(found)[0].outcome == ""
    assert remarks(found, defended=True, granted=True) == []


def test_a_metric_by_which_the_defense_is_worth_less_is_told_besides() -> None:
    ssim = make_readings(HELD, LEAKING, metric="ssim")
    told = remarks([*make_readings(HELD, HELD), *ssim], defended=True, granted=True)
    assert ["by PSNR" in sentence for sentence in told] == [True, False]
    assert "by SSIM, the clients' defense beats only" in told[1]
    assert len(remarks([*make_readings(LEAKING, LEAKING), *ssim], defended=True, granted=True)) == 1


def test_to_fail_is_worth_less_than_to_beat_the_naive_attack() -> None:
    leaking = [value / 20 for value in LEAKING]
    ssim = make_readings(leaking, leaking[::-1], metric="ssim", floor=0.5)
    told = remarks([*make_readings(HELD, LEAKING), *ssim], defended=True, granted=True)
    assert ["beats only" in sentence for sentence in told] == [True, False]
    assert "by SSIM, the clients' defense does not hold" in told[1]


NAIVE_ALONE = "only naive attacks ran: the adversary is not granted the defenses"


def test_of_a_defended_run_it_is_said_that_only_naive_attacks_were_made() -> None:
    naive = score_readings(rows(HELD, knows=False), {})
    [told] = remarks(naive, defended=True, granted=False)
    assert NAIVE_ALONE in told
    assert remarks(naive, defended=False, granted=False) == []
    assert remarks([], defended=True, granted=False) == []


def test_attacks_that_read_no_defenses_are_named() -> None:
    found = [*make_readings(HELD, LEAKING), *score_readings(rows(HELD, knows=False, title="spear"), {})]
    assert remarks(found, defended=True, granted=True)[1:] == [
        "Only naive attacks ran, because these attacks do not use knowledge of defenses: spear."
    ]
    assert "only naive attacks" not in " ".join(remarks(make_readings(HELD, HELD), defended=True, granted=False))


def test_attacks_whose_scores_are_the_same_are_told_once() -> None:
    alike, further = make_readings(HELD, HELD), {"metric": "ssim"}
    assert equal_attacks(alike) == {"sme adaptive": "sme"}
    [once] = merge_equal_attacks(alike)
    assert once.summary.attack == "sme, naive and adaptive alike"
    assert (once.verdict, once.summary.text) == (alike[0].verdict, alike[0].summary.text)
    other = make_readings(HELD, [*HELD[:4], 9.1001]) + make_readings(HELD, HELD, **further)
    assert merge_equal_attacks(other) == other
    by_one = [*alike, *make_readings(HELD, LEAKING, **further)]
    assert merge_equal_attacks(by_one) == by_one


def test_a_terminal_shows_one_table_of_what_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    monkeypatch.setattr(work_shown, "console", console)
    for found, tables in ((make_readings(HELD, HELD), 1), (make_readings(HELD, LEAKING), 2)):
        told = remarks(found, defended=True, granted=True)
        work_shown.show_scores(SimpleNamespace(readings=found, ceilings=(), remarks=told))  # type: ignore[arg-type]
        shown = console.export_text()
        assert shown.count("Scores of sme") == tables
        assert ("Scores of sme, naive and adaptive alike" in shown) == (tables == 1)
        assert ("knowing the defense has no effect" in " ".join(shown.split())) == (tables == 1)


def test_rounds_without_the_defense_stand_beside_what_is_said_of_it() -> None:
    def remarks_on(rounds: int) -> list[str]:
        config = make_tiny_config(defense=[{"name": "censor", "rounds": 2}], federation={"rounds": rounds})
        audit: Any = SimpleNamespace(config=config, experiment=Experiment(config), spec=make_attack_file("sme"))
        return defense_remarks(make_readings(HELD, LOWER), audit)

    sentence = "censor does not act in 3 of 5 rounds, the first of which is round 3"
    assert any(remark.startswith(sentence) for remark in remarks_on(5))
    assert not any("does not act" in remark for remark in remarks_on(2))


@pytest.mark.parametrize(("defense", "is_told"), [("augmentation", True), ("mixup", True), ("gradient-prune", False)])
def test_a_defense_that_changes_examples_is_told_beside_what_is_said_of_it(defense: str, is_told: bool) -> None:
    config = make_tiny_config(defense=[{"name": defense}])
    audit: Any = SimpleNamespace(config=config, experiment=Experiment(config), spec=make_attack_file("sme"))
    told = [remark for remark in defense_remarks(make_readings(HELD, LOWER), audit) if "as they were" in remark]
    assert [remark.split()[0] for remark in told] == [defense] * is_told
