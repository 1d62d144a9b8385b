"""What defenses are worth in a sweep: each attack beside the same attack without a defense.

1. The scores with and without the defense are read by `fedsim.report.verdicts`.
2. Their differences are paired by victim and seed.
3. From both follows an outcome for each metric. `fedsim.report.attack_outcomes` joins those of an attack.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from fedsim.base.errors import format_percent, number_of
from fedsim.base.grouping import group_by
from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.report.adaptive import (
    HOLDS,
    MARGIN,
    NOT_CONCLUDED,
    ONLY_NAIVE,
    NaiveAdaptivePair,
    at_floor,
    differ_beyond_rounding,
    is_judged,
)
from fedsim.report.exposed_victims import explain_open_rounds, find_exposed_victim, find_largest_unseen
from fedsim.report.paired_differences import PairedDifference, subtract_control
from fedsim.report.summary import EXACT, difference_by_shared_candidates, finds_exact_only, summarise
from fedsim.report.sweep_groups import MIN_SEEDS, Row, Unit, mean_by_victim_and_seed, score_interval
from fedsim.report.verdicts import BEYOND, LEAKS, MIN_VICTIMS, ScoreReading, judge_summary

WEAKENS, NOTHING = "weakens", "does nothing"
WORST_FIRST = (NOTHING, ONLY_NAIVE, WEAKENS, NOT_CONCLUDED, HOLDS)
_MARGIN_OF_DECIBELS = 1.0
"""Difference in dB that is hardly any, as `MARGIN` is of shares."""
_MARGIN_OF_GAIN = 0.2
"""Share of what leaks without a defense that is hardly any of it."""
_FAILED, _NOT_COMPUTED = "the attack failed", "not computed"


@dataclass(frozen=True, kw_only=True)
class AttackReading:
    """Scores of an attack in one form by one metric in one setting.

    Attributes:
        values: by victim and seed.
        floors: what the best guess gets, likewise.
        unscored: pairs of victim and seed on whom it was made, and that have no score.
        exact: pairs of whom all claims are exact.
    """

    reading: ScoreReading
    values: Mapping[Unit, float]
    floors: Mapping[Unit, float]
    unscored: frozenset[Unit]
    exact: frozenset[Unit]

    @property
    def mean_text(self) -> str:
        """The mean, or that all claims are exact."""
        is_exact = finds_exact_only(self.reading.summary.metric, self.values, dict.fromkeys(self.exact, 1.0))
        return EXACT if is_exact else f"{self.reading.summary.mean:.3g}"


@dataclass(frozen=True, kw_only=True)
class DefenseOutcome:
    """What the defense of a setting is worth against one attack, by one metric.

    Attributes:
        control: the attack without the defense; None where it has no scores.
        naive: the attack by an adversary that does not know the defense; None where it has no scores.
        adaptive: the attack by one that does; None where it was not made.
        difference: of the stronger of both to the control; None where nothing can be paired.
        was_tried: whether the adaptive attack differs from the naive one by any metric.
        is_granted: whether other attacks of this setting know the defense.
        exposed: the victim that is still exposed, see `find_exposed_victim`.
        open_question: see `explain_open_rounds`.
        word: one of `WORST_FIRST`.
    """

    attack: str
    metric: str
    control: AttackReading | None
    naive: AttackReading | None
    adaptive: AttackReading | None
    difference: PairedDifference | None = None
    was_tried: bool
    is_granted: bool = False
    exposed: str
    open_question: str
    word: str = NOT_CONCLUDED
    reason: str

    @property
    def sides(self) -> list[AttackReading]:
        """Forms of the attack on clients with the defense."""
        return [side for side in (self.naive, self.adaptive) if side is not None]

    @property
    def strongest(self) -> AttackReading:
        """The form that gets most."""
        return max(self.sides, key=lambda side: side.reading.summary.gain)

    def subtract_control(self, values: Mapping[Unit, float], control: AttackReading) -> PairedDifference | None:
        """Subtract the control's scores from `values`; victims of a seed may share candidates in either."""
        examples = [*control.reading.summary.examples.values(), *self.strongest.reading.summary.examples.values()]
        shared_error = difference_by_shared_candidates(self.metric, examples)
        exact = self.strongest.exact & control.exact
        return subtract_control(self.metric, values, control.values, exact=exact, shared_error=shared_error)

    @property
    def metric_name(self) -> str:
        """Name of the metric, with its unit."""
        return describe_metric(self.metric).label

    @property
    def floor_text(self) -> str:
        """What the best guess gets."""
        return f"{self.sides[0].reading.summary.floor:.4g}"

    @property
    def means_text(self) -> str:
        """Means without the defense and with it, by the stronger adversary, and the guess."""
        if self.control is None:
            return ""
        floor = self.strongest.reading.summary.floor
        return f"{self.control.mean_text} without, {self.strongest.mean_text} with, guess {floor:.3g}"

    @property
    def leaks_without_defense(self) -> bool:
        """Whether the attack is shown to leak without the defense."""
        return self.control is not None and self.control.reading.verdict == LEAKS

    @property
    def leaks_on_any_side(self) -> bool:
        """Whether the attack is shown to leak without the defense, or with it by either adversary."""
        return self.leaks_without_defense or self.leaks_with_defense

    @property
    def leaks_with_defense(self) -> bool:
        """Whether the attack is shown to leak with the defense, by either adversary."""
        return any(side.reading.verdict == LEAKS for side in self.sides)

    @property
    def is_weaker(self) -> bool:
        """Whether the leakage without the defense is shown to be lower with it, also by the adaptive attack."""
        if self.adaptive is None or self.difference is None:
            return False
        return self.leaks_without_defense and self.difference.is_less

    @property
    def is_weaker_naively(self) -> bool:
        """Whether the leakage without the defense is shown to be lower with it, and no attack was adaptive."""
        is_less = self.difference is not None and self.difference.is_less
        return self.adaptive is None and self.leaks_without_defense and is_less

    @property
    def severity(self) -> int:
        """Place of the outcome among all, the worst first."""
        return WORST_FIRST.index(self.word)


def attack_outcomes(
    rows: Sequence[Row], controls: Sequence[Row], no_control: str, open_rounds: Collection[int] = ()
) -> list[DefenseOutcome]:
    """Return the outcome against each attack by each metric with a verdict, in the order of preference."""
    outcomes = []
    by_attack, controls_by_attack = group_by(rows, itemgetter("attack")), group_by(controls, itemgetter("attack"))
    for attack, own_rows in by_attack.items():
        if all(row["baseline"] == "1" for row in own_rows):
            continue
        control_rows = controls_by_attack.get(attack, [])
        metrics = sort_metrics({row["metric"] for row in own_rows if row["metric"]})
        forms: dict[str, tuple[AttackReading | None, ...]] = {}
        for metric in metrics:
            forms[metric] = tuple(read_scores(own_rows, metric, adaptive=knows) for knows in (False, True))
        was_tried = any(
            naive and adaptive and differ_beyond_rounding(naive.values, adaptive.values)
            for naive, adaptive in forms.values()
        )
        for metric, (naive, adaptive) in forms.items():
            if not any(side is not None and is_judged(side.reading) for side in (naive, adaptive)):
                continue
            outcome = DefenseOutcome(
                attack=attack,
                metric=metric,
                control=read_scores(control_rows, metric, adaptive=False),
                naive=naive,
                adaptive=adaptive,
                was_tried=was_tried,
                is_granted=any(row["knows_defenses"] == "1" for row in rows),
                exposed=find_exposed_victim(metric, own_rows, control_rows),
                open_question=explain_open_rounds(own_rows, open_rounds),
                reason=no_control,
            )
            outcomes.append(_judge_against_control(outcome))
    return outcomes


def _judge_against_control(outcome: DefenseOutcome) -> DefenseOutcome:
    """Return the outcome with its difference to the control, and, where there has to be one, with a verdict."""
    if outcome.control is not None:
        outcome = replace(outcome, difference=outcome.subtract_control(outcome.strongest.values, outcome.control))
    if outcome.reason:  # why there is no control
        return outcome
    word, reason = _judge(outcome)
    return replace(outcome, word=word, reason=reason)


def read_scores(rows: Iterable[Row], metric: str, *, adaptive: bool) -> AttackReading | None:
    """Read the scores of an attack by one metric, over all victims and seeds; None where there are none.

    Seeds are averaged for each victim, as further random starts are: they do not tell of another one.
    """
    of_form = [row for row in rows if row["knows_defenses"] == str(int(adaptive))]
    scored = [row for row in of_form if row["metric"] == metric]
    if not any(row["value"] for row in scored):
        return None
    higher = scored[0]["better"] == "higher"
    score_rows = [_score_row(row, metric, higher) for row in of_form if row["metric"] in (metric, "")]
    (item,) = summarise(score_rows)
    verdict, remark = judge_summary(item)
    values = mean_by_victim_and_seed(scored, "value")
    low, high = score_interval(metric, values)
    # The interval over victims and seeds, as everywhere on the page.
    shown = replace(item, low=low, high=high, num_seeds=len({seed for _, seed in values}))
    reading = ScoreReading(summary=shown, verdict=verdict, remark=remark, baseline=scored[0]["baseline"] == "1")
    attacked = {(row["victim"], row["seed"]) for row in of_form if row["metric"] in (metric, "")}
    floors = mean_by_victim_and_seed(scored, "floor")
    exact_shares = mean_by_victim_and_seed([row for row in of_form if row["metric"] == EXACT], "value")
    return AttackReading(
        reading=reading,
        values=values,
        floors=floors,
        unscored=frozenset(attacked - values.keys()),
        exact=frozenset(unit for unit, share in exact_shares.items() if share == 1),
    )


def _score_row(row: Row, metric: str, higher: bool) -> dict[str, str]:
    """Return a row of `sweep.csv` as one of `scores.csv`."""
    missing = "" if row["value"] else _NOT_COMPUTED if row["metric"] else _FAILED
    numbers = {name: row[name] or "nan" for name in ("value", "floor", "examples")}
    labels = {name: row[name] for name in ("attack", "victim", "round", "repeat", "floor_guess", "ceiling")}
    rest = {"nearest_public": "nan", "instrument": "", "variant": "", "settings": "{}", "doubt": row.get("doubt", "")}
    granted = "defenses" if row["knows_defenses"] == "1" else ""
    return {
        **rest,
        **labels,
        **numbers,
        "metric": metric,
        "missing": missing,
        "granted": granted,
        "higher_is_better": str(higher),
    }


def _judge(outcome: DefenseOutcome) -> tuple[str, str]:
    """Return a word for an outcome and the reason for it, see `docs/how-to/compare-defenses.md`."""
    control, naive, adaptive, difference = outcome.control, outcome.naive, outcome.adaptive, outcome.difference
    if control is None or difference is None:
        return NOT_CONCLUDED, "the attack has no scores of the same victims without the defense"
    if control.reading.verdict != LEAKS:
        if outcome.leaks_with_defense:
            word = NOTHING if difference.is_more or difference.falls_by_at_most(0.0) else NOT_CONCLUDED
            return word, "the attack leaks with the defense, but is not shown to leak without it"
        return NOT_CONCLUDED, _explain_silent_control(control.reading)
    # The adversary that knows the defense.
    if naive is not None and adaptive is not None:
        pair = NaiveAdaptivePair(
            naive=naive.reading,
            adaptive=adaptive.reading,
            control=control.reading,
            was_tried=outcome.was_tried,
        )
        is_open = outcome.exposed or outcome.open_question or difference.num_victims < MIN_VICTIMS
        if pair.outcome == HOLDS and not is_open:
            num_victims = min(naive.reading.summary.count, adaptive.reading.summary.count)
            unseen = format_percent(find_largest_unseen(num_victims), ".0f")
            return HOLDS, (
                "without the defense the attack leaks; with it, neither the naive nor the adaptive attack is beyond "
                "the guess; "
                f"{number_of(num_victims, 'victim')} do not exclude that up to {unseen} of others are exposed"
            )
        if pair.outcome == ONLY_NAIVE:
            return ONLY_NAIVE, "the adaptive attack is beyond the guess"
    return _judge_difference(outcome, control, difference)


def _judge_difference(outcome: DefenseOutcome, control: AttackReading, difference: PairedDifference) -> tuple[str, str]:
    """Return a word by the difference to an attack that leaks without the defense, and the reason for it."""
    if difference.shared_error == math.inf:
        return NOT_CONCLUDED, (
            "the victims of a seed may share the candidates that set its threshold, so that a difference has no "
            f"interval with fewer than {MIN_SEEDS} seeds; add seeds"
        )
    if not difference.is_measured:
        return NOT_CONCLUDED, f"the difference of {number_of(difference.count, 'pair')} has no interval"
    if difference.is_less and outcome.adaptive is None:
        remedy = (
            "it cannot use the granted knowledge of this defense, so add an attack that can"
            if outcome.is_granted
            else "grant defenses = true in [adversary.knowledge], or choose an attack that uses them"
        )
        return NOT_CONCLUDED, f"leakage is lower, but only the naive attack ran; {remedy}"
    if difference.is_less:
        return WEAKENS, _explain_remaining_leak(outcome, difference.num_victims)
    # Of victims whose message the attack could do nothing with, it gets no more than a guess.
    guesses = {unit: control.floors[unit] for unit in outcome.strongest.unscored if unit in control.floors}
    lowest = outcome.subtract_control({**outcome.strongest.values, **guesses}, control)
    assert lowest is not None
    if outcome.leaks_with_defense and lowest.is_more:
        return NOTHING, "leakage is higher than without it"
    margin = min(find_margin(outcome.metric), _MARGIN_OF_GAIN * control.reading.summary.gain)
    if outcome.leaks_with_defense and lowest.falls_by_at_most(margin):
        return NOTHING, _explain_equality(outcome.metric, difference, margin)
    return NOT_CONCLUDED, _explain_uncertainty(difference)


def find_margin(metric: str) -> float:
    """Return the difference by a metric that is hardly any; 0 where no such difference is known.

    >>> find_margin("psnr"), find_margin("identified"), find_margin("ssim")
    (1.0, 0.05, 0.0)
    """
    facts = describe_metric(metric)
    if facts.unit == "dB":
        return _MARGIN_OF_DECIBELS
    return MARGIN if facts.is_share or facts.evidence == "candidates" else 0.0


def _explain_equality(metric: str, difference: PairedDifference, margin: float) -> str:
    if difference.is_equal:
        return "leakage is the same as without it"
    unit = describe_metric(metric).unit
    shown_margin = f"at most {f'{margin:.2g} {unit}'.rstrip()}" if margin else "no"
    return f"leakage is {shown_margin} lower than without it"


def _explain_uncertainty(difference: PairedDifference) -> str:
    """Say that a difference may be none or a large one, and what would show more."""
    pairs = f"{number_of(difference.count, 'pair')} in {number_of(difference.num_seeds, 'seed')}"
    remedy = "add seeds" if difference.num_seeds < MIN_SEEDS else "add seeds or victims"
    return f"{pairs} are too few to show whether leakage is lower than without the defense; {remedy}"


def _explain_silent_control(control: ScoreReading) -> str:
    if control.verdict == BEYOND and control.summary.count < MIN_VICTIMS:
        return f"only {number_of(control.summary.count, control.summary.unit)} attacked, too few to conclude from"
    return f"without the defense no leak is shown either ({control.verdict or control.remark})"


def _explain_remaining_leak(outcome: DefenseOutcome, num_victims: int) -> str:
    if outcome.leaks_with_defense:
        return "leakage is lower than without it, but there is still a leak"
    if outcome.open_question:
        return f"leakage is lower than without it in the attacked rounds, but {outcome.open_question}"
    if outcome.exposed:
        return (
            "leakage is lower than without it, but for "
            f"{outcome.exposed} it is at least half of what an attack gets on average without it"
        )
    if num_victims < MIN_VICTIMS:
        victims = number_of(num_victims, "victim")
        return f"leakage is lower than without it, but only {victims} were attacked with it and without"
    if all(at_floor(side.reading.summary) for side in outcome.sides):
        return (
            "leakage is lower than without it, but the attack did not use its knowledge of the defense, so that no "
            "adaptive attack was tried"
        )
    remedy = "candidates or seeds" if describe_metric(outcome.metric).evidence == "candidates" else "victims"
    return f"leakage is lower than without it; whether there is still a leak is open; add {remedy} to decide"
