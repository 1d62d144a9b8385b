"""What a lay reader is told first: how many examples of the victims were recovered, how well, and what chance gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.base.errors import number_of
from fedsim.report.attacker_names import name_attacker
from fedsim.report.summary import Summary
from fedsim.report.verdicts import LEAKS, ScoreReading

_ROUNDING = 1e-9
_RARE_MATCHES = 0.1
"""Number of examples below which chance matches hardly any."""
_NEGLIGIBLE_SHARE = 0.1
"""Largest share of exact or recognisable examples that chance may have given without being named."""
_RECOVERED_HOW = {
    "exact": "recovered {} exactly",
    "recovered": "recovered {} recognisably",
    "identified": "identified {} among examples of others",
}
"""What was done with examples, by the metric that says so, the best first."""


@dataclass(frozen=True, kw_only=True)
class _Recovery:
    """Examples that an attack recovered by one metric.

    Attributes:
        how: what was done with them, in words, with a place for how many.
        matches: number of examples that were recovered.
        total: number of examples that could have been.
        chance: how many would be matched by chance.
        says_chance: whether chance is named even where it gives few of them.
    """

    how: str
    matches: int
    total: int
    chance: float
    summary: Summary
    says_chance: bool

    @property
    def gain(self) -> float:
        """Return how many more examples were recovered than by chance."""
        return self.matches - self.chance

    @property
    def quantity(self) -> str:
        """Return `all 6`, or `2 of 6`."""
        return f"all {self.total}" if self.matches == self.total else f"{self.matches} of {self.total}"

    @property
    def chance_text(self) -> str:
        """Return how many chance gives, in a clause; empty where that goes without saying."""
        if self.says_chance or self.chance >= max(_RARE_MATCHES, _NEGLIGIBLE_SHARE * self.matches):
            return f", where chance would give {_describe_expected(self.chance)}"
        return ""


def describe_recovery(readings: Sequence[ScoreReading], plural: str, *, are_texts: bool = False) -> str:
    """Say for a lay reader how many of the victims' examples were recovered, and how well; empty where none were.

    The attack and the metric that recovered most beyond chance are told first, and of equal ones the better metric.
    Fewer examples that came back better are told after them.

    Args:
        are_texts: whether they are texts, which are recovered whole or not at all.
    """
    recoveries = _find_recoveries(readings, are_texts=are_texts)
    if not recoveries:
        return ""
    most = max(recoveries, key=lambda recovery: recovery.gain)
    item = most.summary
    # Of one victim, one message is told, since the others may be about the same examples.
    victims = number_of(item.count, "victim") if item.unit == "victim" else "1 victim, in one of them"
    if item.unit == "victim" and item.num_missing:
        victims += f" (of {item.count + item.num_missing})"
    sentence = (
        f"From the messages of {victims}, {name_attacker(item.settings)} "
        f"{most.how.format(f'{most.quantity} {plural}')}{most.chance_text} (by {item.attack})"
    )
    for better in recoveries[: recoveries.index(most)]:
        how = better.how.format(better.quantity)
        sentence += f"; and {how}{better.chance_text} (by {better.summary.attack})"
    return f"{sentence}."


def _find_recoveries(readings: Sequence[ScoreReading], *, are_texts: bool) -> list[_Recovery]:
    """Return for each metric, the best first, what the attack recovered that recovered most."""
    recoveries = []
    for metric, how in (_RECOVERED_HOW | ({"recovered": "recovered {} word for word"} if are_texts else {})).items():
        of_metric = []
        for reading in readings:
            item = reading.summary
            if item.metric == metric and reading.verdict == LEAKS and not reading.baseline:
                matches, total, chance = _count_matches(item)
                recovery = _Recovery(
                    how=how,
                    matches=matches,
                    total=total,
                    chance=chance,
                    summary=item,
                    says_chance=metric == "identified",
                )
                of_metric.append(recovery)
        if of_metric:
            recoveries.append(max(of_metric, key=lambda recovery: recovery.gain))
    return recoveries


def _describe_expected(count: float) -> str:
    """Return an expected number of examples as a lay reader counts them.

    >>> _describe_expected(6.5), _describe_expected(0.75), _describe_expected(3.04), _describe_expected(0.01)
    ('6 or 7', 'fewer than one', 'about 3', 'hardly any')
    """
    if count < _RARE_MATCHES:
        return "hardly any"
    if count <= 1:
        return "fewer than one"
    if abs(count - round(count)) <= _RARE_MATCHES:
        return f"about {round(count)}"
    return f"{math.floor(count)} or {math.ceil(count)}"


def _count_matches(item: Summary) -> tuple[int, int, float]:
    """Return how many examples of all victims are matched, of how many, and how many by chance.

    Of one victim, its best message counts.
    """
    matches = [item.examples[unit] * value for unit, value in item.values.items()]
    chances = [item.examples[unit] * floor for unit, floor in item.floors.items()]
    if item.unit == "victim":
        return math.floor(sum(matches) + _ROUNDING), round(sum(item.examples.values())), math.fsum(chances)
    best = max(range(len(matches)), key=lambda number: matches[number])
    return math.floor(matches[best] + _ROUNDING), round(list(item.examples.values())[best]), chances[best]
