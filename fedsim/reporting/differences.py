"""How the scores of one run differ from those of another, paired by victim where both attacked the same clients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.evaluation import statistics
from fedsim.reporting.summary import NO_LEAKAGE, Summary, difference_interval, summarise, units

MORE, LESS, NOT_SHOWN = "leaks more", "leaks less", "no difference shown"
SEEN_MORE, SEEN_LESS, MIXED = "more, as far as seen", "less, as far as seen", "neither, as far as seen"
FEWEST, _EACH_SIDE = 6, 0.025
"""Fewest victims from which anything is concluded, for of five all differ in one direction by chance in 1 of 16 cases;
and how often chance may conclude for each direction."""
_SAME_CLIENTS = ("data.", "partition.", "federation.seed", "federation.clients")
"""The settings from which it follows who holds what."""
Rows = Sequence[Mapping[str, Any]]
Update = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of one attack in two runs.

    Attributes:
        attack: its name, as in both runs' reports.
        base: the scores over all victims of the first run.
        other: those of the other run.
        paired: whether the difference is taken victim by victim.
        count: how many differences, one a victim (or a round, or a random start: see `Summary.unit`), or, where it is
            not paired, the smaller of the two numbers of victims.
        unit: what is counted.
        mean: of `other` less `base`; NaN where nothing can be compared.
        low: where the 95 % confidence interval of `mean` begins; NaN where there is none.
        high: where it ends.
        verdict: one of this module's words; empty for a metric that says nothing about leakage.
        remark: the reason, and what else differs between the two attacks.
    """

    attack: str
    base: Summary
    other: Summary
    paired: bool
    count: int
    unit: str
    mean: float
    low: float
    high: float
    verdict: str
    remark: str


def same_clients(base: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Why clients of one number are not the same in two runs with these settings by `table.key`; empty if they are."""
    if base is None or other is None:
        return "the settings of a recording made elsewhere are not known"
    keys = sorted(key for key in {*base, *other} if key.startswith(_SAME_CLIENTS) and base.get(key) != other.get(key))
    return f"{', '.join(keys)} differ{'s' * (len(keys) == 1)}" if keys else ""


def differences(base: Rows, other: Rows, why_not_paired: str = "") -> list[Difference]:
    """One for each attack and metric that both runs scored, in the order of `base`.

    Args:
        base, other: rows of `scores.csv`.
        why_not_paired: what `same_clients` says.
    """
    ours, theirs = ({(item.attack, item.metric): item for item in summarise(rows)} for rows in (base, other))
    return [_difference(one, theirs[key], base, other, why_not_paired) for key, one in ours.items() if key in theirs]


def alone(base: Rows, other: Rows) -> tuple[list[str], list[str]]:
    """The attacks that only `base` scored, and those that only `other` did: there they failed, or were not made."""
    ours, theirs = (list(dict.fromkeys(item.attack for item in summarise(rows))) for rows in (base, other))
    return [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]


def _difference(base: Summary, other: Summary, ours: Rows, theirs: Rows, why_not: str) -> Difference:
    missing = base.missing or other.missing
    found = _unpaired(base, other) if why_not else _paired(base, other, ours, theirs)
    verdict, remark = ("", missing) if missing else _reading(base, found, why_not)
    changed = [
        f"its {what} differ"
        for what, one, two in (
            ("settings", base.settings, other.settings),
            ("granted facts", base.granted, other.granted),
        )
        if one != two
    ]
    return Difference(
        attack=base.attack,
        base=base,
        other=other,
        paired=not why_not,
        count=found.count,
        unit=found.unit,
        mean=found.mean,
        low=found.low,
        high=found.high,
        verdict=verdict,
        remark="; ".join(filter(None, (remark, *changed))),
    )


@dataclass(frozen=True)
class _Found:
    """Differences in short; `ahead` and `behind` count those towards more and towards less leakage."""

    mean: float
    low: float
    high: float
    count: int
    unit: str
    ahead: int = 0
    behind: int = 0


def _paired(base: Summary, other: Summary, ours: Rows, theirs: Rows) -> _Found:
    """By update and random start; then averaged as scores are, see `Summary`."""
    one, two = _by_update(base, ours), _by_update(other, theirs)
    shared = [key for key in one if key in two]
    # two perfect claims have the same score, though infinity less infinity is no number
    values = {key: 0.0 if one[key] == two[key] else two[key] - one[key] for key in shared}
    rows = [{"victim": v, "round": r, "value": value} for (v, r, _), value in values.items()]
    unit, by_unit = units(rows, "value")
    array = np.array(list(by_unit.values()))
    low, high = difference_interval(base.metric, array)
    towards = array if base.higher_is_better else -array
    return _Found(
        statistics.mean(array), low, high, len(array), unit, int((towards > 0).sum()), int((towards < 0).sum())
    )


def _by_update(item: Summary, rows: Rows) -> dict[Update, float]:
    title, variant = item.made
    found = defaultdict(list)
    for row in rows:
        if (row["attack"], row["variant"], row["metric"]) == (title, variant, item.metric) and not row["missing"]:
            found[str(row["victim"]), str(row["round"]), str(row["repeat"])].append(float(row["value"]))
    return {key: float(np.mean(values)) for key, values in found.items()}


def _unpaired(base: Summary, other: Summary) -> _Found:
    """Welch's interval of the difference of two means."""
    from scipy.stats import ttest_ind  # which takes a second to import

    one, two = (np.array(list(item.values.values())) for item in (base, other))
    count = min(len(one), len(two))
    low = high = math.nan
    if count > 1 and np.isfinite([*one, *two]).all() and one.std() + two.std():
        low, high = map(float, ttest_ind(two, one, equal_var=False).confidence_interval())
    unit = base.unit if base.unit == other.unit else "start"
    return _Found(other.mean - base.mean, low, high, count, unit)


def _reading(base: Summary, found: _Found, why_not: str) -> tuple[str, str]:
    """A verdict, and the reason for it: a sign test over victims, or Welch's interval where they are not paired."""
    if (about := NO_LEAKAGE.get(base.metric)) is not None:
        return "", about
    if not found.count or math.isnan(found.mean):
        return "", "no victim was attacked in both runs"
    told = f"{found.count} {found.unit}{'s' * (found.count != 1)}"
    enough = found.unit == "victim" and found.count >= FEWEST
    if why_not:
        towards = [end if base.higher_is_better else -end for end in (found.low, found.high)]
        verdict = MORE if min(towards) > 0 else LESS if max(towards) < 0 else NOT_SHOWN
        return (
            verdict if enough else ""
        ), f"{told}, not paired, since {why_not}{'' if enough else '; too few to tell'}"
    told = f"more in {found.ahead}, less in {found.behind} of {told}"
    if not enough:
        seen = {(True, False): SEEN_MORE, (False, True): SEEN_LESS}
        return seen.get((found.ahead > 0, found.behind > 0), MIXED), f"{told}, too few to tell"
    return _by_signs(found), told


def _by_signs(found: _Found) -> str:
    """The sign test; equal scores count for neither direction."""
    for verdict, side in ((MORE, found.ahead), (LESS, found.behind)):
        if statistics.more_than_half(side, found.count, _EACH_SIDE):
            return verdict
    return NOT_SHOWN
