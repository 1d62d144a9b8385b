"""Verdicts: what the scores of an attack show, by a test that suits their kind.

This module alone decides; the page, its headline and the terminal quote it. Each test says that an
attack leaks in at most 5 % of cases where the messages say nothing, see `docs/explanation/verdicts.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.audit.evaluation import statistics
from fedsim.audit.evaluation.imputation import IMPUTED_GUESS
from fedsim.audit.evaluation.matches import CHANCE
from fedsim.base.errors import number_of
from fedsim.interfaces.attack import BASELINE_SOURCES, OPTIMAL
from fedsim.interfaces.metric import describe_metric, explain_no_verdict
from fedsim.report.summary import Summary, are_independent, explain_inconclusive, mean_deviation_by_chance, summarise

LEAKS, UNDECIDED, GUESSING = "leaks", "undecided", "no better than guessing"
BEYOND, NOT_BEYOND = "beyond the floor", "not beyond the floor"
WORSE_THAN_IMPUTATION = "worse than imputation"
NOT_JUDGED = "not judged"
MIN_VICTIMS = 5
"""Fewest victims from which a sign test concludes: by chance, four are all beyond the floor in 1 of 16 cases."""
_STAKES = (0.25, 0.5, 0.75, 1.0)
"""Shares of what is left that are put on each victim; a small one loses little where few victims leak."""
_TURNED_ROUND = "so far below chance that the scores seem reversed: a higher one has to mean likelier"
_ROUNDING = 1e-9
"""Mean gains up to this are none: a guess that is right as often as its floor is no better than that."""


@dataclass(frozen=True, kw_only=True)
class AttackTraits:
    """Traits of an attack that have to be known to read its scores.

    Attributes:
        name: its name, which distinguishes it from the others; empty where the scores alone give the name.
        main_metric: the metric by which it is judged first; empty for the first one.
        source: the model that it takes as its claim; empty where there is none.
    """

    name: str = ""
    main_metric: str = ""
    source: str = ""

    @property
    def baseline(self) -> str:
        """Why this does not count as an attack; empty for an attack."""
        if self.source == OPTIMAL:
            return "no attack: it reads the victim's optimal local model, which only the evaluator has"
        return f"a baseline: it reads the {self.source} model as it was sent" if self.source in BASELINE_SOURCES else ""


@dataclass(frozen=True, kw_only=True)
class ScoreReading:
    """Summary with its verdict in a few words (empty where there is none), and a remark on it.

    Attributes:
        baseline: whether it does not count as an attack, see `AttackTraits.baseline`.
    """

    summary: Summary
    verdict: str
    remark: str
    baseline: bool = False

    @property
    def brief_remark(self) -> str:
        """The remark without the reason of a doubt, for where that stands before."""
        return self.remark.removesuffix(f": {self.summary.doubt_reason}") if self.summary.num_in_doubt else self.remark


def score_readings(
    rows: Iterable[Mapping[str, Any]], traits: Mapping[tuple[str, str], AttackTraits]
) -> list[ScoreReading]:
    """Judge the scores of each attack by each metric; the main metric of an attack comes first.

    Args:
        rows: rows of `scores.csv`.
        traits: by the title and the variant of the attack.
    """
    items = summarise(rows, {attack_key: kind.name for attack_key, kind in traits.items() if kind.name})
    attacks = list(dict.fromkeys(item.attack for item in items))

    def order(item: Summary) -> tuple[int, bool]:
        return attacks.index(item.attack), item.metric != _traits(traits, item).main_metric

    readings = []
    for item in sorted(items, key=order):
        attack_traits = _traits(traits, item)
        verdict, remark = judge_summary(item)
        if attack_traits.source == OPTIMAL:
            verdict, remark = "", ""
        readings.append(
            ScoreReading(
                summary=item,
                verdict=verdict,
                remark="; ".join(filter(None, (attack_traits.baseline, remark))),
                baseline=bool(attack_traits.baseline),
            )
        )
    return readings


def _traits(kinds: Mapping[tuple[str, str], AttackTraits], item: Summary) -> AttackTraits:
    return kinds.get(item.attack_key, AttackTraits())


def judge_summary(item: Summary) -> tuple[str, str]:
    """Return a verdict in a few words, and the reason for it.

    `leaks` is decided by the metric's evidence, see `fedsim.interfaces.metric.Evidence`. Where examples
    are matched, such as identified or exact, so many more of those of all victims are than chance
    matches that it does so in at most 5 % of cases (e-values [Shafer2021]). Where candidates are
    ranked, their ranks are better than chance orders them, over the candidates of all victims.
    Otherwise more than half of such victims are beyond the floor: the mean is, and so many of the
    attacked victims are that tossing a coin for each would give as many in at most 5 % of cases (sign
    test). Unlike an interval of the mean, this holds for scores of any distribution, with two modes or
    with infinite PSNR; where scores are of a few messages, the coin falls as the floor says.

    With fewer than five victims no outcome of the sign test is that rare, and the rounds of one victim
    say nothing about another victim. There the verdict only says what was seen: `beyond the floor`,
    `not beyond the floor`, or `undecided` where it is some of them. The same holds where victims are
    compared with one another, see `are_independent`.

    Victims without a score may be just those that leak nothing, so that each test counts them as such. Findings in
    doubt count as the others do, and the remark says why they are; but ranks of candidates in doubt, which may be of
    two kinds, are no proof of a leak, since chance would order them otherwise.
    """
    # No score, or none that says anything about leakage.
    if item.missing:
        return NOT_JUDGED, item.missing
    if reason := explain_no_verdict(item.metric):
        return "", reason
    if math.isnan(item.gain):
        return "", "no floor to compare with"
    verdict, remark = _judge_scores(item)
    if item.num_missing:
        remark += f"; not computed for {number_of(item.num_missing, 'victim')}: {item.why_missing}"
    if item.num_in_doubt:
        remark += f"; {item.doubt_text}"
        if verdict == LEAKS and describe_metric(item.metric).evidence == "candidates":
            verdict = UNDECIDED
    return verdict, remark


def _judge_scores(item: Summary) -> tuple[str, str]:
    """Return the verdict of `judge_summary` on scores that have a floor."""
    match describe_metric(item.metric).evidence:
        case "matches" if item.floor_guess == CHANCE:  # otherwise no examples of others are known
            return _judge_matches(item)
        case "candidates":
            return _judge_candidates(item)
    return _judge_victims(item)


def _judge_matches(item: Summary) -> tuple[str, str]:
    """Judge by how many times as many examples are matched as by chance, over all victims.

    By chance this ratio is 1 on average, whatever the claims are, and even where the examples of a
    client are alike, so that they are matched together or not at all: it is an e-value. Victims are
    independent, so a gambler that puts a share of a fortune on each of them multiplies it by
    1 + share * (ratio - 1), and has 20 times as much in at most 5 % of cases (Ville's inequality).
    A fortune is split between several such shares; on one victim alone all of it is put.
    """
    examples, values, floors = (np.array(list(part.values())) for part in (item.examples, item.values, item.floors))
    if item.unit != "victim":  # rounds and starts of one victim are about the same examples
        examples, values, floors = (part.mean(keepdims=True) for part in (examples, values, floors))
    # Where nothing is matched, chance has matched nothing either. A victim without a score gains nothing.
    ratios = np.divide(values, floors, out=np.ones_like(values), where=floors > 0)
    ratios = np.append(ratios, np.zeros(item.num_missing))
    stakes = _STAKES if len(ratios) > 1 else _STAKES[-1:]
    fortune = float(np.mean([np.prod(1 + stake * (ratios - 1)) for stake in stakes]))
    count = float(examples.sum() + item.num_missing * examples.mean())
    chance = float(examples @ floors / examples.sum()) * count
    remark = f"{examples @ values:.4g} of {count:.4g} examples, {chance:.2g} expected by chance"
    verdict = _conclude(1 / fortune if fortune else 1.0, item)
    if verdict == LEAKS and examples @ values < 2 * (examples @ floors):  # the sum hides whom the verdict rests on
        clearest = int(np.argmax(ratios[: len(values)]))
        matched, expected = examples[clearest] * np.array([values[clearest], floors[clearest]])
        remark += f"; of one victim {matched:.2g} of {examples[clearest]:.4g}, {expected:.2g} expected"
    if verdict == UNDECIDED and values.min() == 1 and not item.num_missing:
        remark += ", too few examples of others for a verdict"
    return verdict, remark


def _judge_candidates(item: Summary) -> tuple[str, str]:
    """Judge by the ranks of all candidates: the mean over victims has a known spread by chance."""
    from scipy.special import ndtr  # likewise

    metric = describe_metric(item.metric)
    candidates = sum(item.examples.values()) if item.unit == "victim" else max(item.examples.values())
    total = item.count + item.num_missing if item.unit == "victim" else 1
    remark = f"{candidates:.0f} candidates of {number_of(total, 'victim')}"
    # Where values by chance are skewed, the mean over victims counts as that of one, which spreads no less.
    mean = item.floor + (item.mean - item.floor) * (item.count / total if item.unit == "victim" else 1)
    tail = metric.chance_tail(mean, round(min(item.examples.values())))
    if tail is not None:
        return _conclude(tail, item), remark
    spreads = [metric.chance_spread(round(count)) for count in item.examples.values()]
    deviations, steps = (np.array(part) for part in zip(*spreads, strict=True))
    if item.unit != "victim":  # rounds and starts of one victim are about the same candidates
        gain, deviation = item.gain, float(deviations.max())
    else:
        # A victim without a score has no gain and spreads as the others do.
        gain = item.gain * item.count / total
        deviation = mean_deviation_by_chance(math.sqrt(float(np.square(deviations).mean())), total)
    # Half a step makes the normal distribution fit one of few values.
    half_step = float(steps.min()) / total / 2
    p_value = float(ndtr(-(gain - half_step) / deviation))
    # Scores that are lower for members reveal as much, once they are reversed.
    if gain < 0 and float(ndtr((gain + half_step) / deviation)) <= statistics.SIGNIFICANCE:
        return UNDECIDED, f"{remark}, {_TURNED_ROUND}"
    return _conclude(p_value, item), remark


def _conclude(p_value: float, item: Summary) -> str:
    if p_value <= statistics.SIGNIFICANCE and item.gain > _ROUNDING:
        return LEAKS
    return UNDECIDED if item.gain > _ROUNDING else GUESSING


def _judge_victims(item: Summary) -> tuple[str, str]:
    """Judge by how many victims are beyond their floor."""
    counts = f"{item.num_beyond} of {number_of(item.count, item.unit)}"
    # Too few victims for a test: say what was seen.
    if not are_independent(item.metric, item.unit) or item.count < MIN_VICTIMS:
        verdict = {item.count: BEYOND, 0: NOT_BEYOND}.get(item.num_beyond, UNDECIDED)
        caveat = "of one victim only" if item.unit != "victim" else explain_inconclusive(item.metric)
        if verdict == NOT_BEYOND and item.floor_guess == IMPUTED_GUESS and item.gain < 0:
            verdict = WORSE_THAN_IMPUTATION
        beyond = " beyond the floor" if verdict in (UNDECIDED, WORSE_THAN_IMPUTATION) else ""
        return verdict, "one victim only" if item.count == 1 else f"{counts}{beyond}, {caveat}"
    # Sign test.
    tested = item.count + item.num_missing
    is_significant = statistics.is_more_than_half(item.num_beyond, tested, expected=_chance_ahead(item))
    if is_significant and item.gain > _ROUNDING:
        return LEAKS, counts
    if is_significant or item.gain > _ROUNDING:
        return UNDECIDED, f"{counts} beyond the floor"
    is_worse = statistics.is_fewer_than_half(item.num_beyond, item.count) and item.gain < 0
    verdict = WORSE_THAN_IMPUTATION if is_worse and item.floor_guess == IMPUTED_GUESS else GUESSING
    return verdict, f"{counts} beyond the floor"


def _chance_ahead(item: Summary) -> float:
    """Return how often a guess as good as the floor is ahead of it, by chance alone; at least half.

    Where a victim's score is of one message, and so 0 or 1, the guess is ahead of its floor whenever it is right: as
    often as the floor says. This is nearly so for a few messages.
    """
    return max(0.5, item.floor) if describe_metric(item.metric).evidence == "few messages" else 0.5
