"""Attacks made without and with knowledge of the clients' defenses, and what the defenses are worth against each.

A defense that holds off an adversary that does not know it may do nothing against one that does. What is said here
follows from the readings of `fedsim.report.summary`, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation import statistics
from fedsim.audit.plan import ADAPTIVE
from fedsim.federation.defense_limits import describe_defense_limits
from fedsim.interfaces.metric import describe_metric
from fedsim.report.summary import (
    Summary,
    are_independent,
    difference_interval,
    interval_text,
    join_titles,
    mean_deviation_by_chance,
)
from fedsim.report.sweep_groups import MIN_SEEDS
from fedsim.report.verdicts import LEAKS, MIN_VICTIMS, NOT_JUDGED, ScoreReading

EQUAL_SUFFIX = ", naive and adaptive alike"
"""Suffix of the name of an attack whose scores equal those of the adaptive one."""
MARGIN = 0.05
"""How far an interval may reach beyond chance and still show that there is hardly any leak."""
_SAME_UP_TO = 0.01
"""Share of a score by which an adaptive attack may differ from the naive one and still be the same but for rounding."""
HOLDS, ONLY_NAIVE, FAILS, NOT_CONCLUDED = "holds", "beats only the naive attack", "does not hold", "not concluded"


@dataclass(frozen=True, kw_only=True)
class NaiveAdaptivePair:
    """Readings of one attack by one metric, for an adversary that does not know the defenses and for one that does.

    Attributes:
        control: the same attack on clients without a defense, where it was made.
        was_tried: whether the adaptive attack differs from the naive one by another metric.
    """

    naive: ScoreReading
    adaptive: ScoreReading
    control: ScoreReading | None = None
    was_tried: bool = False

    @property
    def outcome(self) -> str:
        """Verdict on the defense against this attack, by this metric.

        It `holds` where the scores of both are at or below the floor with the whole of their 95 % intervals, the
        control leaks, which shows that the defense is why, and the adaptive attack differs from the naive one. It
        `does not hold` where either leaks, because the adversary may choose. It `beats only the naive attack` where
        that stays at the floor and the adaptive one leaks. All else is not concluded; empty where a score has no
        verdict.
        """
        sides = (self.naive, self.adaptive)
        if not all(is_judged(side) for side in sides):
            return ""
        if self.adaptive.verdict == LEAKS and at_floor(self.naive.summary):
            return ONLY_NAIVE
        if any(side.verdict == LEAKS for side in sides):
            return FAILS
        return NOT_CONCLUDED if self._open_question else HOLDS

    @property
    def css(self) -> str:
        """CSS class of the outcome on the page, the same as that of readings."""
        return {FAILS: "leaks", ONLY_NAIVE: "leaks", NOT_CONCLUDED: "undecided"}.get(self.outcome, "")

    @property
    def differences(self) -> list[float]:
        """Adaptive less naive score of each victim (round, start) that both attacked."""
        naive, adaptive = self.naive.summary.values, self.adaptive.summary.values
        return [adaptive[unit] - naive[unit] for unit in naive if unit in adaptive]

    @property
    def equal(self) -> bool:
        """Equality of both: knowing the defense changes no score."""
        naive, adaptive = self.naive, self.adaptive
        texts = [(side.summary.text, side.summary.floor_text, side.verdict, side.remark) for side in (naive, adaptive)]
        return naive.summary.values == adaptive.summary.values and texts[0] == texts[1]

    @property
    def difference_text(self) -> str:
        """Mean of the differences, with its 95 % interval where there is one."""
        differences, item = np.array(self.differences), self.naive.summary
        if not len(differences) or not np.isfinite(differences).all():
            return "–"
        return interval_text(float(differences.mean()), *difference_interval(item.metric, differences, item.unit))

    @property
    def floor_text(self) -> str:
        """Floor of both; that of either where they differ, as guesses for claimed labels do."""
        texts = [side.summary.floor_text for side in (self.naive, self.adaptive)]
        return " / ".join(dict.fromkeys(filter(None, texts)))

    @property
    def sentence(self) -> str:
        """Sentence on what the defense is worth, and by which scores."""
        item, name = self.naive.summary, self.naive.summary.short_name
        floors = " and ".join(dict.fromkeys(side.summary.explained_floor for side in (self.naive, self.adaptive)))
        scores = (
            f"naive {item.explained_interval}, adaptive {self.adaptive.summary.explained_interval}, floor {floors}, "
            f"{item.count_text}"
        )
        verdict = {
            HOLDS: "the clients' defense holds: neither the naive nor the adaptive attack is beyond the floor",
            ONLY_NAIVE: "the clients' defense beats only the naive attack: it stays at the floor, and the "
            "adaptive one leaks",
            FAILS: f"the clients' defense does not hold: {self._leaking_attacks}",
            NOT_CONCLUDED: f"nothing is concluded about the clients' defense: {self._open_question}",
        }[self.outcome]
        differences = self.differences
        no_effect = "; knowing the defense has no effect" if differences and not any(differences) else ""
        return f"Against {item.attack}, by {name}, {verdict}; {scores}{no_effect}."

    @property
    def _leaking_attacks(self) -> str:
        sides = {"naive": self.naive, "adaptive": self.adaptive}
        names = [name for name, side in sides.items() if side.verdict == LEAKS]
        if not names:
            return "neither leaks"
        return "both attacks leak" if len(names) == 2 else f"the {names[0]} attack leaks"

    @property
    def _open_question(self) -> str:
        """Why the defense cannot be said to hold; empty where it can."""
        if not all(at_floor(side.summary) for side in (self.naive, self.adaptive)):
            return self._why_not_at_floor
        if not self.was_tried and not differ_beyond_rounding(self.naive.summary.values, self.adaptive.summary.values):
            return (
                "the adaptive attack has the results of the naive one, so that no adaptive attack was tried (the "
                "defense's adversary_view defines what an adaptive adversary does)"
            )
        if self.control is None:
            return (
                "neither attack is beyond the floor, but it is unknown whether it is without the defense; also attack "
                "clients without a defense, such as in a sweep with defense = [[], [...]]"
            )
        if self.control.verdict != LEAKS:
            return "the same attack does not leak without the defense either, so that it says nothing about the defense"
        return ""

    @property
    def _why_not_at_floor(self) -> str:
        num_victims = [
            side.summary.count if side.summary.unit == "victim" else 1 for side in (self.naive, self.adaptive)
        ]
        if max(num_victims) < MIN_VICTIMS:
            return f"fewer than {MIN_VICTIMS} victims are too few"
        if self.naive.summary.num_missing or self.adaptive.summary.num_missing:
            return "some victims have no score, and may be those that leak"
        if not are_independent(self.naive.summary.metric):
            return "its victims are compared with one another, so that nothing is concluded from one run"
        evidence = describe_metric(self.naive.summary.metric).evidence
        if evidence in ("matches", "candidates"):  # whose interval is another than the one shown
            units = "examples" if evidence == "matches" else "candidates"
            return f"neither attack is shown to leak, but so few {units} leave open whether one does"
        return "neither attack leaks, but the 95 % interval of a score is not wholly at or below its floor"


def differ_beyond_rounding(naive: Mapping[Any, float], adaptive: Mapping[Any, float]) -> bool:
    """Return whether scores of an adaptive attack differ from those of the naive one by more than rounding errors.

    Where none does by any metric, no attack made use of knowing the defense.

    >>> differ_beyond_rounding({"0": 9.0, "1": 9.5}, {"0": 9.0, "1": 9.51})
    False
    """
    shared = [unit for unit in naive if unit in adaptive and naive[unit] != adaptive[unit]]
    largest = max(map(abs, naive.values()), default=0.0)
    return any(abs(adaptive[unit] - naive[unit]) > _SAME_UP_TO * largest for unit in shared)


def at_floor(item: Summary) -> bool:
    """Return whether the whole 95 % interval of a score is at or below its floor.

    Where examples are matched or candidates ranked, chance is on either side of the floor, and the
    interval may reach up to `MARGIN` beyond it, or up to the floor's own size where that is less;
    candidates that are ranked worse than by chance are not at it, since the order can be turned round.
    Victims may share the non-members, which the interval over them does not show, so
    that it is widened; that of a rate, such as TPR, is the one by chance. False where there are too few
    victims to conclude from, or where some have no score.
    """
    if (
        item.missing
        or item.num_missing
        or not are_independent(item.metric, item.unit)
        or item.count < MIN_VICTIMS
        or not math.isfinite(item.floor)
    ):
        return False
    match describe_metric(item.metric).evidence:
        case "matches":
            matches = sum(item.examples[victim] * value for victim, value in item.values.items())
            high = statistics.binomial_interval(round(matches), round(sum(item.examples.values())))[1]
            return high <= item.floor + MARGIN
        case "candidates":
            return _are_candidates_at_floor(item)
    return item.high <= item.floor if item.higher_is_better else item.low >= item.floor


def _are_candidates_at_floor(item: Summary) -> bool:
    """Return whether the interval of a score of candidates is within the margin of chance, see `at_floor`."""
    metric, count = describe_metric(item.metric), round(min(item.examples.values()))
    margin = min(MARGIN, item.floor)
    # Victims of one seed may share non-members.
    deviation = statistics.NORMAL_QUANTILE * metric.chance_spread(count)[0] / math.sqrt(item.num_seeds)
    if metric.chance_tail(item.mean, count) is not None:
        # The interval of a share assumes no distribution: of a rate of some percent it reaches many times that. That
        # scores are turned round is seen by the AUC.
        return item.mean + mean_deviation_by_chance(deviation, item.count) <= item.floor + margin
    # Several seeds tell how far shared candidates move the mean.
    shared = 0.0 if item.num_seeds >= MIN_SEEDS else mean_deviation_by_chance(deviation)
    low, high = statistics.widen_interval(item.low, item.high, item.mean, shared)
    return low >= item.floor - margin and high <= item.floor + margin


def pair_readings(readings: Sequence[ScoreReading]) -> list[NaiveAdaptivePair]:
    """Pair the readings of each attack that was made both ways, otherwise with equal settings and knowledge."""
    pairs = []
    tried = set[str]()
    for naive in readings:
        for adaptive in readings:
            if naive.summary.knows_defenses or not adaptive.summary.knows_defenses:
                continue
            if _is_adaptive_form(adaptive.summary, naive.summary):
                pairs.append(NaiveAdaptivePair(naive=naive, adaptive=adaptive))
                if differ_beyond_rounding(naive.summary.values, adaptive.summary.values):
                    tried.add(naive.summary.attack)
    return [replace(pair, was_tried=pair.naive.summary.attack in tried) for pair in pairs]


def equal_attacks(readings: Sequence[ScoreReading]) -> dict[str, str]:
    """Return adaptive attacks whose scores all equal those of the naive attack, with the name of that one.

    They are equal where the adversary's view of the defense (`adversary_view`) is the gradient as it is.
    """
    both = pair_readings(readings)
    names = {pair.adaptive.summary.attack: pair.naive.summary.attack for pair in both}
    differing = {pair.adaptive.summary.attack for pair in both if not pair.equal}
    return {adaptive: naive for adaptive, naive in names.items() if adaptive not in differing}


def merge_equal_attacks(readings: Sequence[ScoreReading]) -> list[ScoreReading]:
    """Drop the readings of adaptive attacks that equal the naive ones, and rename the latter to say so."""
    naive_of_equal = equal_attacks(readings)
    new_names = {naive: f"{naive}{EQUAL_SUFFIX}" for naive in naive_of_equal.values()}
    merged = []
    for reading in readings:
        attack = reading.summary.attack
        if attack not in naive_of_equal:
            merged.append(replace(reading, summary=replace(reading.summary, attack=new_names.get(attack, attack))))
    return merged


def _is_adaptive_form(adaptive: Summary, naive: Summary) -> bool:
    return (
        adaptive.attack_key[0] == f"{naive.attack_key[0]} {ADAPTIVE}"
        and adaptive.metric == naive.metric
        and adaptive.settings == naive.settings
        and adaptive.granted - {"defenses"} == naive.granted
    )


def defense_remarks(readings: Sequence[ScoreReading], audit: Audit | None) -> list[str]:
    """Return the `remarks` on an audit's attacks, and on rounds without a defense; without one there are none."""
    defended = audit is not None and audit.config is not None and bool(audit.config.defense)
    granted = audit is not None and audit.spec.adversary.knowledge.defenses is True
    sentences = remarks(readings, defended=defended, granted=granted)
    if audit is not None and audit.experiment is not None and any(is_judged(reading) for reading in readings):
        rounds = range(1, audit.experiment.config.federation.rounds + 1)
        sentences += describe_defense_limits(audit.experiment.defenses, rounds)
    return sentences


def remarks(readings: Sequence[ScoreReading], *, defended: bool, granted: bool) -> list[str]:
    """Return sentences on what the clients' defense is worth against each attack, and who did not try to get past it.

    An attack is judged by its first metric that has a verdict; a further metric by which the defense is worth less gets
    a sentence of its own.
    """
    judged = [pair for pair in pair_readings(readings) if is_judged(pair.naive) and is_judged(pair.adaptive)]
    sentences = []
    for name in dict.fromkeys(pair.naive.summary.attack for pair in judged):
        first, *further = (pair for pair in judged if pair.naive.summary.attack == name)
        sentences.append(first.sentence)
        for pair in further:
            if _WORTH[pair.outcome] < _WORTH[first.outcome] and pair.outcome != NOT_CONCLUDED:
                sentences.append(pair.sentence)
    return sentences + (_remarks_on_naive_attacks(readings, granted=granted) if defended else [])


_WORTH = {FAILS: 0, ONLY_NAIVE: 1, NOT_CONCLUDED: 2, HOLDS: 3}


def is_judged(reading: ScoreReading) -> bool:
    """Return whether a reading is of an attack, not of a baseline, and has a verdict."""
    return reading.verdict not in ("", NOT_JUDGED) and not reading.baseline


def _remarks_on_naive_attacks(readings: Sequence[ScoreReading], *, granted: bool) -> list[str]:
    """Say which attacks were only made without knowledge of the defenses."""
    paired = {pair.naive.summary.attack for pair in pair_readings(readings)}
    unpaired = dict[str, None]()
    for reading in readings:
        item = reading.summary
        if not reading.baseline and not item.knows_defenses and item.attack not in paired:
            unpaired[item.attack] = None
    if not unpaired:
        return []
    names = join_titles(list(unpaired))
    if granted:
        return [f"Only naive attacks ran, because these attacks do not use knowledge of defenses: {names}."]
    if paired:
        return [f"Only the naive attack ran for: {names}."]
    return [
        "The clients have a defense, but only naive attacks ran: the adversary is not granted the defenses "
        "([adversary.knowledge] defenses = true). An adaptive adversary may recover more."
    ]
