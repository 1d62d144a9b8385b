"""An attack made twice, without and with knowledge of the clients' defenses, and what these are worth against it.

A defense that holds off an adversary who does not know it may do nothing against one who does. What is said here
follows from the readings of `fedsim.reporting.summary`, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedsim.auditing.plan import ADAPTIVE
from fedsim.reporting.summary import (
    FEWEST,
    LEAKS,
    NOT_JUDGED,
    Line,
    Summary,
    apart,
    difference_interval,
    interval_text,
    listed,
)

BOTH = ", naive and adaptive alike"
"""What is added to the name of an attack whose scores say what those of the adaptive one say."""
_ALIKE = 0.01
"""Share of a score by which an adaptive attack may differ from the naive one and still be the same but for rounding."""
HOLDS, ONLY_NAIVE, FAILS, OPEN = "holds", "beats only the naive attack", "does not hold", "undecided"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One metric of one attack, by an adversary who does not know the defenses and by one who does.

    Attributes:
        naive: of the adversary who does not.
        adaptive: of the one who does.
        control: the same attack on clients without a defense, where it was made.
    """

    naive: Line
    adaptive: Line
    control: Line | None = None

    @property
    def outcome(self) -> str:
        """What the defense is worth against this attack, by this metric.

        It `holds` where the scores of both are at or below the floor with the whole of their 95 % intervals, the
        control leaks, which shows that the defense is why, and the adaptive attack is another one than the naive. It
        `does not hold` where either leaks, because the adversary may choose. It `beats only the naive attack` where
        that stays at the floor and the adaptive one leaks. All else is undecided; empty where a score has no
        verdict.
        """
        sides = (self.naive, self.adaptive)
        if not all(is_judged(side) for side in sides):
            return ""
        if self.adaptive.verdict == LEAKS and at_floor(self.naive.summary):
            return ONLY_NAIVE
        if any(side.verdict == LEAKS for side in sides):
            return FAILS
        return OPEN if self._missing else HOLDS

    @property
    def css(self) -> str:
        """Name of the style of its outcome on the page, which is that of readings."""
        return {FAILS: "leaks", ONLY_NAIVE: "leaks", OPEN: "undecided"}.get(self.outcome, "")

    @property
    def differences(self) -> list[float]:
        """Adaptive less naive score of each victim (round, start) that both attacked."""
        naive, adaptive = self.naive.summary.values, self.adaptive.summary.values
        return [adaptive[unit] - naive[unit] for unit in naive if unit in adaptive]

    @property
    def equal(self) -> bool:
        """Whether both say the same: knowing the defense changes no score."""
        naive, adaptive = self.naive, self.adaptive
        texts = [(side.summary.text, side.summary.floor_text, side.verdict, side.remark) for side in (naive, adaptive)]
        return naive.summary.values == adaptive.summary.values and texts[0] == texts[1]

    @property
    def difference_text(self) -> str:
        """Their mean, with its 95 % interval where there is one."""
        found, item = np.array(self.differences), self.naive.summary
        if not len(found) or not np.isfinite(found).all():
            return "–"
        return interval_text(float(found.mean()), *difference_interval(item.metric, found, item.unit))

    @property
    def floor_text(self) -> str:
        """The floor of both; that of either where they differ, as guesses for claimed labels do."""
        texts = [side.summary.floor_text for side in (self.naive, self.adaptive)]
        return " / ".join(dict.fromkeys(filter(None, texts)))

    @property
    def sentence(self) -> str:
        """What the defense is worth, and by which scores."""
        item, name = self.naive.summary, self.naive.summary.name.split(",")[0]
        floors = " and ".join(dict.fromkeys(f"{side.summary.floor:.4g}" for side in (self.naive, self.adaptive)))
        scores = (
            f"{item.interval_text} naive, {self.adaptive.summary.interval_text} adaptive, floor {floors}, "
            f"{item.count_text}"
        )
        what = {
            HOLDS: "holds: neither the naive nor the adaptive attack is beyond the floor",
            ONLY_NAIVE: "beats only the adversary who does not know it: the naive attack stays at the floor, the "
            "adaptive one leaks",
            FAILS: f"does not hold: {self._leaking}",
            OPEN: f"is undecided: {self._missing}",
        }[self.outcome]
        same = "; knowing the defense changes nothing" if self.differences and not any(self.differences) else ""
        return f"Against {item.attack}, by {name}, the clients' defense {what} ({scores}){same}."

    @property
    def _leaking(self) -> str:
        named = {"naive": self.naive, "adaptive": self.adaptive}
        leaking = [name for name, side in named.items() if side.verdict == LEAKS]
        return {2: "both attacks leak", 1: f"the {' '.join(leaking)} attack leaks"}.get(len(leaking), "neither leaks")

    @property
    def _missing(self) -> str:
        """What is missing for `holds`; nothing where nothing is."""
        if not all(at_floor(side.summary) for side in (self.naive, self.adaptive)):
            return self._doubt
        largest = max(map(abs, self.naive.summary.values.values()))
        if max(map(abs, self.differences), default=0.0) <= _ALIKE * largest:
            return (
                "the adaptive attack found what the naive one did, so that nobody tried to get past the defense (what "
                "an adversary makes of it is its adversary_view)"
            )
        if self.control is None:
            return (
                "neither attack is beyond the floor, and nothing shows that it would be without the defense; attack "
                "clients without one as well, such as in a sweep with defense = [[], [...]]"
            )
        if self.control.verdict != LEAKS:
            return "without the defense the same attack does not leak either, so that it says nothing of the defense"
        return ""

    @property
    def _doubt(self) -> str:
        most = max(side.summary.count if side.summary.unit == "victim" else 1 for side in (self.naive, self.adaptive))
        if most < FEWEST:
            return f"from fewer than {FEWEST} victims nothing is concluded"
        if not apart(self.naive.summary.metric):
            return "its victims are compared with one another, so that nothing is concluded from one run"
        return "neither attack leaks, but the 95 % interval of a score is not wholly at or below its floor"


def at_floor(item: Summary) -> bool:
    """Whether the whole 95 % interval of the score is at or below its floor, of enough victims to conclude from."""
    if item.missing or not apart(item.metric, item.unit) or item.count < FEWEST or not math.isfinite(item.floor):
        return False
    return item.high <= item.floor if item.higher_is_better else item.low >= item.floor


def pairs(found: Sequence[Line]) -> list[Pair]:
    """Each attack and metric that was made both ways, with the same settings and otherwise the same knowledge."""
    naive = [line for line in found if not line.summary.knows_defenses]
    return [
        Pair(naive=one, adaptive=other)
        for one in naive
        for other in found
        if other.summary.knows_defenses and _alike(one.summary, other.summary)
    ]


def same(found: Sequence[Line]) -> dict[str, str]:
    """Adaptive attacks all of whose scores are those of the naive attack, and what that one is called.

    So it is where what an adversary makes of a defense is the gradient as it is.
    """
    both = pairs(found)
    names = {pair.adaptive.summary.attack: pair.naive.summary.attack for pair in both}
    differing = {pair.adaptive.summary.attack for pair in both if not pair.equal}
    return {adaptive: naive for adaptive, naive in names.items() if adaptive not in differing}


def told_once(found: Sequence[Line]) -> list[Line]:
    """`found` without the lines of adaptive attacks that are the `same` as the naive ones, whose name tells of both."""
    again = same(found)
    named = {naive: f"{naive}{BOTH}" for naive in again.values()}
    return [
        replace(line, summary=replace(line.summary, attack=named.get(line.summary.attack, line.summary.attack)))
        for line in found
        if line.summary.attack not in again
    ]


def _alike(naive: Summary, adaptive: Summary) -> bool:
    return (
        adaptive.made[0] == f"{naive.made[0]} {ADAPTIVE}"
        and adaptive.metric == naive.metric
        and adaptive.settings == naive.settings
        and adaptive.granted - {"defenses"} == naive.granted
    )


def remarks(found: Sequence[Line], *, defended: bool, granted: bool) -> list[str]:
    """What the clients' defense is worth, a sentence for each attack, and who did not try to get past it.

    An attack is judged by its first metric that has a verdict; a further metric by which the defense is worth less is
    told besides.

    Args:
        defended: whether the clients of the run have defenses.
        granted: whether the adversary knows them.
    """
    judged = [pair for pair in pairs(found) if is_judged(pair.naive) and is_judged(pair.adaptive)]
    sentences = []
    for name in dict.fromkeys(pair.naive.summary.attack for pair in judged):
        first, *others = (pair for pair in judged if pair.naive.summary.attack == name)
        worse = (pair for pair in others if _WORTH[pair.outcome] < _WORTH[first.outcome] and pair.outcome != OPEN)
        sentences += [first.sentence, *(pair.sentence for pair in worse)]
    return sentences + (_naive_alone(found, granted=granted) if defended else [])


_WORTH = {FAILS: 0, ONLY_NAIVE: 1, OPEN: 2, HOLDS: 3}


def is_judged(line: Line) -> bool:
    """Whether it is an attack's and has a verdict."""
    return line.verdict not in ("", NOT_JUDGED) and not line.baseline


def _naive_alone(found: Sequence[Line], *, granted: bool) -> list[str]:
    """Which attacks were made without knowledge of the defenses alone."""
    both = {pair.naive.summary.attack for pair in pairs(found)}
    attacks = [line.summary for line in found if not line.baseline]
    alone = list(dict.fromkeys(i.attack for i in attacks if not i.knows_defenses and i.attack not in both))
    if not alone:
        return []
    if granted:
        return [f"Made by the naive adversary alone, because they read no defenses: {listed(alone)}."]
    return [
        "The clients defend themselves, and only naive attacks were made: the adversary is not granted the defenses "
        "([adversary.knowledge] defenses = true), so nothing is said of one who knows them."
        if not both
        else f"Made by the naive adversary alone: {listed(alone)}."
    ]
