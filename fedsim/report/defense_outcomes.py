"""What defenses are worth in a sweep: each attack beside the same attack without a defense.

1. The scores with and without the defense are read by `fedsim.report.verdicts`.
2. Their differences are paired by victim and seed.
3. From both follows an outcome for each metric. `fedsim.report.attack_outcomes` joins those of an attack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.report.adaptive import HOLDS, MARGIN, NOT_CONCLUDED, ONLY_NAIVE, NaiveAdaptivePair, at_floor, is_judged
from fedsim.report.paired_differences import PairedDifference, subtract_control
from fedsim.report.summary import number_of, summarise
from fedsim.report.sweep_groups import MIN_SEEDS, Row, Unit, mean_by_victim_and_seed, score_interval
from fedsim.report.verdicts import BEYOND, LEAKS, MIN_VICTIMS, ScoreReading, judge_summary

WEAKENS, NOTHING = "weakens", "does nothing"
WORST_FIRST = (NOTHING, ONLY_NAIVE, WEAKENS, NOT_CONCLUDED, HOLDS)
_MARGIN_OF_DECIBELS = 1.0
"""Difference in dB that is hardly any, as `MARGIN` is of shares."""
_FAILED, _NOT_COMPUTED = "the attack failed", "not computed"


@dataclass(frozen=True, kw_only=True)
class AttackReading:
    """Scores of an attack in one form by one metric in one setting.

    Attributes:
        reading: what they show.
        values: by victim and seed.
    """

    reading: ScoreReading
    values: Mapping[Unit, float]


@dataclass(frozen=True, kw_only=True)
class DefenseOutcome:
    """What the defense of a setting is worth against one attack, by one metric.

    Attributes:
        attack: its label.
        metric: the metric.
        control: the attack without the defense; None where it has no scores.
        naive: the attack by an adversary who does not know the defense; None where it has no scores.
        adaptive: the attack by one who does; None where it was not made.
        difference: of the stronger of both to the control; None where nothing can be paired.
        word: one of `WORST_FIRST`.
        reason: why.
    """

    attack: str
    metric: str
    control: AttackReading | None
    naive: AttackReading | None
    adaptive: AttackReading | None
    difference: PairedDifference | None
    word: str
    reason: str

    @property
    def metric_name(self) -> str:
        """Name of the metric, with its unit."""
        return describe_metric(self.metric).label

    @property
    def floor_text(self) -> str:
        """What the best guess gets."""
        sides = [side for side in (self.naive, self.adaptive, self.control) if side is not None]
        return f"{sides[0].reading.summary.floor:.4g}"

    @property
    def means_text(self) -> str:
        """Means without the defense and with it, by the stronger adversary, and the guess."""
        if self.control is None:
            return ""
        sides = [side.reading.summary for side in (self.naive, self.adaptive) if side is not None]
        item = max(sides, key=lambda side: side.gain)
        without = self.control.reading.summary.mean
        return f"{without:.3g} without, {item.mean:.3g} with, guess {item.floor:.3g}"

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
        return any(side is not None and side.reading.verdict == LEAKS for side in (self.naive, self.adaptive))

    @property
    def is_weaker(self) -> bool:
        """Whether what leaks without the defense is shown to leak less with it, whoever attacks."""
        if self.adaptive is None or self.difference is None:
            return False
        return self.leaks_without_defense and self.difference.is_less

    @property
    def is_weaker_naively(self) -> bool:
        """Whether what leaks without the defense is shown to leak less with it, and nobody attacked who knows it."""
        is_less = self.difference is not None and self.difference.is_less
        return self.adaptive is None and self.leaks_without_defense and is_less

    @property
    def badness(self) -> int:
        """Place of the outcome among all, the worst first."""
        return WORST_FIRST.index(self.word)


def attack_outcomes(rows: Sequence[Row], controls: Sequence[Row], no_control: str) -> list[DefenseOutcome]:
    """Return the outcome against each attack by each metric with a verdict, in the order of preference.

    Args:
        rows: rows of `sweep.csv` of one setting with a defense.
        controls: those of its controls.
        no_control: why there is none; empty where there is one.
    """
    outcomes = []
    attacks = dict.fromkeys(row["attack"] for row in rows if row["baseline"] != "1")
    for attack in attacks:
        own_rows = [row for row in rows if row["attack"] == attack]
        control_rows = [row for row in controls if row["attack"] == attack]
        for metric in sort_metrics({row["metric"] for row in own_rows if row["metric"]}):
            control = read_scores(control_rows, metric, adaptive=False)
            naive, adaptive = (read_scores(own_rows, metric, adaptive=knows) for knows in (False, True))
            if any(side is not None and is_judged(side.reading) for side in (naive, adaptive)):
                outcomes.append(_outcome(attack, metric, control, naive, adaptive, no_control))
    return outcomes


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
    shown = replace(item, low=low, high=high)  # that over victims and seeds, as everywhere on the page
    reading = ScoreReading(summary=shown, verdict=verdict, remark=remark, baseline=scored[0]["baseline"] == "1")
    return AttackReading(reading=reading, values=values)


def _score_row(row: Row, metric: str, higher: bool) -> dict[str, str]:
    """Return a row of `sweep.csv` as one of `scores.csv`."""
    missing = "" if row["value"] else _NOT_COMPUTED if row["metric"] else _FAILED
    numbers = {name: row[name] or "nan" for name in ("value", "floor", "examples")}
    labels = {name: row[name] for name in ("attack", "victim", "round", "repeat", "floor_guess", "ceiling")}
    rest = {"nearest_public": "nan", "instrument": "", "variant": "", "settings": "{}"}
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


def _outcome(
    attack: str,
    metric: str,
    control: AttackReading | None,
    naive: AttackReading | None,
    adaptive: AttackReading | None,
    no_control: str,
) -> DefenseOutcome:
    sides = [side for side in (naive, adaptive) if side is not None]
    strongest = max(sides, key=lambda side: side.reading.summary.gain)
    difference = None
    if control is not None:
        difference = subtract_control(metric, strongest.values, control.values)
    word, reason = NOT_CONCLUDED, no_control
    if not no_control:
        word, reason = _judge(metric, control, naive, adaptive, difference)
    return DefenseOutcome(
        attack=attack,
        metric=metric,
        control=control,
        naive=naive,
        adaptive=adaptive,
        difference=difference,
        word=word,
        reason=reason,
    )


def _judge(
    metric: str,
    control: AttackReading | None,
    naive: AttackReading | None,
    adaptive: AttackReading | None,
    difference: PairedDifference | None,
) -> tuple[str, str]:
    """Return an outcome and the reason for it, see `docs/how-to/compare-defenses.md`."""
    if control is None or difference is None:
        return NOT_CONCLUDED, "the attack has no scores of the same victims without the defense"
    if control.reading.verdict != LEAKS:
        if any(side is not None and side.reading.verdict == LEAKS for side in (naive, adaptive)):
            word = NOTHING if difference.is_more or difference.falls_by_at_most(0.0) else NOT_CONCLUDED
            return word, "it leaks with the defense; without it no leak is shown"
        return NOT_CONCLUDED, _why_control_says_nothing(control.reading)
    # The adversary who knows the defense.
    if naive is not None and adaptive is not None:
        pair = NaiveAdaptivePair(naive=naive.reading, adaptive=adaptive.reading, control=control.reading)
        if pair.outcome == HOLDS:
            return HOLDS, "without the defense it leaks, and with it neither adversary gets beyond the guess"
        if pair.outcome == ONLY_NAIVE:
            return ONLY_NAIVE, "an adversary who knows the defense gets beyond the guess"
    # The difference to no defense.
    if not difference.is_measured:
        return NOT_CONCLUDED, f"the difference of {number_of(difference.count, 'pair')} has no interval"
    sides = [side.reading for side in (naive, adaptive) if side is not None]
    leaks = any(side.verdict == LEAKS for side in sides)
    if difference.is_less and adaptive is None:
        return NOT_CONCLUDED, (
            "less leaks, but only the naive attack was made; grant defenses = true in [adversary.knowledge], or choose "
            "an attack that reads them"
        )
    if difference.is_less:
        return WEAKENS, _why_it_does_not_hold(sides, leaks=leaks)
    if leaks and difference.is_more:
        return NOTHING, "more leaks than without it"
    if leaks and difference.falls_by_at_most(find_margin(metric)):
        return NOTHING, _explain_equality(metric, difference)
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


def _explain_equality(metric: str, difference: PairedDifference) -> str:
    if difference.is_equal:
        return "as much leaks as without it"
    margin, unit = find_margin(metric), describe_metric(metric).unit
    shown_margin = f"at most {f'{margin:g} {unit}'.rstrip()}" if margin else "no"
    return f"{shown_margin} less leaks than without it"


def _explain_uncertainty(difference: PairedDifference) -> str:
    """Say that a difference may be none or a large one, and what tells more."""
    pairs = f"{number_of(difference.count, 'pair')} in {number_of(difference.num_seeds, 'seed')}"
    remedy = "add seeds" if difference.num_seeds < MIN_SEEDS else "add seeds or victims"
    return f"{pairs} are too few to tell whether less leaks than without the defense; {remedy}"


def _why_control_says_nothing(control: ScoreReading) -> str:
    if control.verdict == BEYOND and control.summary.count < MIN_VICTIMS:
        return f"only {number_of(control.summary.count, control.summary.unit)} attacked, too few to conclude from"
    return f"without the defense no leak is shown either ({control.verdict or control.remark})"


def _why_it_does_not_hold(sides: Sequence[ScoreReading], *, leaks: bool) -> str:
    if leaks:
        return "less leaks than without it, but it still leaks"
    if all(at_floor(side.summary) for side in sides):
        return (
            "less leaks than without it, but the attack made no use of knowing the defense, so that nobody tried to "
            "get past it"
        )
    return "less leaks than without it; whether it still leaks is open"
