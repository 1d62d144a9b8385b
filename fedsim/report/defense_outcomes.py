"""What defenses are worth in a sweep: each attack beside the same attack without a defense.

1. The scores with and without the defense are read by `fedsim.report.verdicts`.
2. Their differences are paired by victim and seed.
3. From both follows an outcome for each metric, and the worst one counts: a defense under which
   examples can still be identified does not pass because PSNR fell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedsim.interfaces.metric import describe_metric, explain_no_verdict, sort_metrics
from fedsim.report.adaptive import HOLDS, NOT_CONCLUDED, ONLY_NAIVE, NaiveAdaptivePair, at_floor, is_judged
from fedsim.report.paired_differences import PairedDifference, subtract_control
from fedsim.report.summary import number_of, summarise
from fedsim.report.sweep_groups import Row, Unit, mean_by_victim_and_seed
from fedsim.report.verdicts import BEYOND, LEAKS, MIN_VICTIMS, ScoreReading, judge_summary

WEAKENS, NOTHING = "weakens", "does nothing"
WORST_FIRST = (NOTHING, ONLY_NAIVE, WEAKENS, NOT_CONCLUDED, HOLDS)
_FAILED, _NOT_COMPUTED = "the attack failed", "not computed"
REMEDY = "attack more victims, train fewer local epochs, choose another attack, or give the attack more iterations"


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
    def leaks_on_any_side(self) -> bool:
        """Whether the attack is shown to leak without the defense, or with it by either adversary."""
        sides = (self.control, self.naive, self.adaptive)
        return any(side is not None and side.reading.verdict == LEAKS for side in sides)

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


def worst_by_attack(outcomes: Iterable[DefenseOutcome]) -> list[DefenseOutcome]:
    """Return the outcome against each attack that counts, the worst attack first.

    It is the worst of those by metrics by which the attack leaks without the defense or with it,
    since the others cannot tell anything; of equal ones, that of the preferred metric.
    """
    by_attack: dict[str, list[DefenseOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_attack[outcome.attack].append(outcome)
    worst = []
    for several in by_attack.values():
        leaking = [item for item in several if item.leaks_on_any_side]
        worst.append(min(leaking or several[:1], key=lambda item: item.badness))
    return sorted(worst, key=lambda item: item.badness)


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
    reading = ScoreReading(summary=item, verdict=verdict, remark=remark, baseline=scored[0]["baseline"] == "1")
    return AttackReading(reading=reading, values=mean_by_victim_and_seed(scored, "value"))


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
        word, reason = _judge(control, naive, adaptive, difference)
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
            return NOTHING, "it leaks with the defense; without it no leak is shown"
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
            "less leaks, but only the naive attack was made; grant defenses = true in [adversary.knowledge]"
        )
    if difference.is_less:
        return WEAKENS, _why_it_does_not_hold(sides, leaks=leaks)
    if leaks:
        return (
            NOTHING,
            "more leaks than without it" if difference.is_more else "no less is shown to leak than without it",
        )
    return NOT_CONCLUDED, "neither a leak with the defense nor a difference to no defense is shown"


def _why_control_says_nothing(control: ScoreReading) -> str:
    if control.verdict == BEYOND and control.summary.count < MIN_VICTIMS:
        return f"only {number_of(control.summary.count, control.summary.unit)} attacked, too few to conclude from"
    return f"without the defense no leak is shown either ({control.verdict or control.remark})"


def _why_it_does_not_hold(sides: Sequence[ScoreReading], *, leaks: bool) -> str:
    if leaks:
        return "less leaks than without it, and still more than a guess gets"
    if all(at_floor(side.summary) for side in sides):
        return (
            "less leaks than without it; knowing it changed nothing for the attack, so that nobody tried to get past it"
        )
    return "less leaks than without it, but it is not shown that no more than a guess does"


def explain_no_leak(rows: Iterable[Row], axes: Sequence[str]) -> str:
    """Say that no attack is shown to leak without a defense, and what to change; empty where one is.

    Args:
        rows: rows of `sweep.csv`, of which those without a defense count; empty where there are none.
        axes: names of the axes, without attack and seed.
    """
    readings = list(_undefended_readings(rows, axes))
    if not readings or any(reading.verdict == LEAKS for reading in readings):
        return ""
    names = dict.fromkeys(reading.summary.attack for reading in readings)
    most = max(reading.summary.count if reading.summary.unit == "victim" else 1 for reading in readings)
    return (
        f"without a defense no attack is shown to leak ({', '.join(names)}; {number_of(most, 'victim')}), so that "
        f"nothing can be concluded about defenses; {REMEDY}"
    )


def find_main_metric(rows: Iterable[Row], axes: Sequence[str]) -> str:
    """Return the first metric by which something leaks without a defense, or else the first one; empty for none.

    Args:
        rows: rows of `sweep.csv`.
        axes: names of the axes, without attack and seed.
    """
    several = list(rows)
    names = sort_metrics({row["metric"] for row in several if row["metric"]})
    metrics = [metric for metric in names if not explain_no_verdict(metric)]
    leaking = {reading.summary.metric for reading in _undefended_readings(several, axes) if reading.verdict == LEAKS}
    return next((metric for metric in metrics if metric in leaking), metrics[0] if metrics else "")


def _undefended_readings(rows: Iterable[Row], axes: Sequence[str]) -> Iterator[ScoreReading]:
    """Yield the readings of all attacks without a defense, by each metric in each setting."""
    by_attack_and_setting: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["cell"] == row["control"] and row["baseline"] != "1":
            by_attack_and_setting[row["attack"], *(row[axis] for axis in axes)].append(row)
    for several in by_attack_and_setting.values():
        for metric in dict.fromkeys(row["metric"] for row in several if row["metric"]):
            scores = read_scores(several, metric, adaptive=False)
            if scores is not None and is_judged(scores.reading):
                yield scores.reading
