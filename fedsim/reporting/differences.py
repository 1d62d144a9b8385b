"""How the scores of one run differ from those of another, paired by victim where both attacked the same clients."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.evaluation import statistics
from fedsim.reporting.summary import (
    NO_LEAKAGE,
    UNDECIDED,
    Summary,
    apart,
    difference_interval,
    err_together,
    few_text,
    interval_text,
    listed,
    summarise,
    units,
)

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
        attack: its name in the runs' reports; where these differ, the one that says more of its settings.
        base: the scores over all victims of the first run.
        other: those of the other run.
        first: the mean of `base`, over the updates that both runs attacked where the difference is paired.
        value: the same of `other`.
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
    first: float
    value: float
    paired: bool
    count: int
    unit: str
    mean: float
    low: float
    high: float
    verdict: str
    remark: str


def difference_text(item: Difference) -> str:
    """The mean and its interval, see `interval_text`; – where nothing can be subtracted, as of two infinite means."""
    return "–" if math.isnan(item.mean) else interval_text(item.mean, item.low, item.high)


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
    ours, theirs = summarise(base), summarise(other)
    partners, others = _partners(ours, theirs), {(item.attack, item.metric): item for item in theirs}
    keys = [(one, (partners.get(one.attack, ""), one.metric)) for one in ours]
    return [_difference(one, others[key], base, other, why_not_paired) for one, key in keys if key in others]


def alone(base: Rows, other: Rows) -> tuple[list[str], list[str]]:
    """The attacks that only `base` scored, and those that only `other` did: there they failed, or were not made."""
    ours, theirs = _left(base, other)
    return (
        [name for name, title in ours.items() if title not in theirs.values()],
        [name for name, title in theirs.items() if title not in ours.values()],
    )


def unlike(base: Rows, other: Rows) -> list[str]:
    """A sentence for each attack of which both runs have scores that are not compared, as it was made otherwise."""
    ours, theirs = _left(base, other)
    return [
        " is not compared with ".join(listed([name for name in some if some[name] == title]) for some in (ours, theirs))
        + ": they are not known to be made with the same settings and granted facts."
        for title in dict.fromkeys(ours.values())
        if title in theirs.values()
    ]


def _left(base: Rows, other: Rows) -> tuple[dict[str, str], dict[str, str]]:
    """The titles, by name, of the attacks of either run that are compared with none."""
    ours, theirs = summarise(base), summarise(other)
    partners = _partners(ours, theirs)
    return (
        {item.attack: item.made[0] for item in ours if item.attack not in partners},
        {item.attack: item.made[0] for item in theirs if item.attack not in partners.values()},
    )


def _partners(ours: Sequence[Summary], theirs: Sequence[Summary]) -> dict[str, str]:
    """By the name of an attack in the first run, its name in the other: the same or, of the rest, made in the same way.

    A run names an attack by its title alone where it made it in one way, and by what differs where in several.
    """
    same = {item.attack for item in ours} & {item.attack for item in theirs}
    one, two = (_by_making([item for item in some if item.attack not in same]) for some in (ours, theirs))
    return {name: name for name in same} | {name: two[made] for made, name in one.items() if made in two}


def _by_making(items: Iterable[Summary]) -> dict[tuple[str, str, frozenset[str]], str]:
    """Names by title, settings and granted facts, where only one attack has these."""
    found = defaultdict(set)
    for item in items:
        found[item.made[0], item.settings, item.granted].add(item.attack)
    return {made: names.pop() for made, names in found.items() if len(names) == 1}


def _difference(base: Summary, other: Summary, ours: Rows, theirs: Rows, why_not: str) -> Difference:
    missing = base.missing or other.missing
    found = _unpaired(base, other) if why_not else _paired(base, other, ours, theirs)
    verdict, remark = ("", missing) if missing else _reading(base, found, why_not)
    left = f"without {found.left} score{'s' * (found.left != 1)} that only one run has"
    changed = [
        f"its {what} differ"
        for what, one, two in (
            ("settings", base.settings, other.settings),
            ("granted facts", base.granted, other.granted),
        )
        if one != two
    ]
    return Difference(
        attack=max(base.attack, other.attack, key=len),
        base=base,
        other=other,
        first=found.first,
        value=found.value,
        paired=not why_not,
        count=found.count,
        unit=found.unit,
        mean=found.mean,
        low=found.low,
        high=found.high,
        verdict=verdict,
        remark="; ".join(filter(None, (remark, left * bool(found.left and found.count), *changed))),
    )


@dataclass(frozen=True)
class _Found:
    """Differences in short.

    `ahead` and `behind` count those towards more and towards less leakage, `left` the scores without a partner; `test`
    is which way Mann and Whitney's test tells, 0 for neither.
    """

    first: float
    value: float
    mean: float
    low: float
    high: float
    count: int
    unit: str
    ahead: int = 0
    behind: int = 0
    left: int = 0
    test: int = 0


def _paired(base: Summary, other: Summary, ours: Rows, theirs: Rows) -> _Found:
    """By update and random start; then averaged as scores are, see `Summary`."""
    one, two = _by_update(base, ours), _by_update(other, theirs)
    shared = [key for key in one if key in two]
    # two perfect claims have the same score, though infinity less infinity is no number
    unit, array = _units({key: 0.0 if one[key] == two[key] else two[key] - one[key] for key in shared})
    first, value = (statistics.mean(_units({key: some[key] for key in shared})[1]) for some in (one, two))
    low, high = difference_interval(base.metric, array, unit)
    towards = array if base.higher_is_better else -array
    return _Found(
        first if shared else base.mean,
        value if shared else other.mean,
        statistics.mean(array),
        low,
        high,
        len(array),
        unit,
        ahead=int((towards > 0).sum()),
        behind=int((towards < 0).sum()),
        left=len(one) + len(two) - 2 * len(shared),
    )


def _units(values: Mapping[Update, float]) -> tuple[str, NDArray[np.float64]]:
    """What is counted, and a mean for each, see `summary.units`."""
    unit, by_unit = units([{"victim": v, "round": r, "value": value} for (v, r, _), value in values.items()], "value")
    return unit, np.array(list(by_unit.values()))


def _by_update(item: Summary, rows: Rows) -> dict[Update, float]:
    title, variant = item.made
    found = defaultdict(list)
    for row in rows:
        if (row["attack"], row["variant"], row["metric"]) == (title, variant, item.metric) and not row["missing"]:
            found[str(row["victim"]), str(row["round"]), str(row["repeat"])].append(float(row["value"]))
    return {key: float(np.mean(values)) for key, values in found.items()}


def _unpaired(base: Summary, other: Summary) -> _Found:
    """Welch's interval of the difference of two means, and Mann and Whitney's test, which allows infinite scores."""
    from scipy.stats import mannwhitneyu, ttest_ind  # which takes a second to import

    one, two = (np.array(list(item.values.values())) for item in (base, other))
    count = min(len(one), len(two))
    unit = base.unit if base.unit == other.unit else "start"
    low = high = math.nan
    if not err_together(base.metric, unit) and count > 1 and np.isfinite([*one, *two]).all() and one.std() + two.std():
        with warnings.catch_warnings():  # SciPy's, of equal scores in one of the runs, whose variance is just 0
            warnings.simplefilter("ignore", RuntimeWarning)
            low, high = map(float, ttest_ind(two, one, equal_var=False).confidence_interval())
    test = 0
    if count:
        higher, chance = mannwhitneyu(two, one)
        towards = float(np.sign(higher - len(one) * len(two) / 2))
        test = int(towards if base.higher_is_better else -towards) if chance <= 2 * _EACH_SIDE else 0
    return _Found(base.mean, other.mean, other.mean - base.mean, low, high, count, unit, test=test)


def _reading(base: Summary, found: _Found, why_not: str) -> tuple[str, str]:
    """A verdict, and the reason for it: a sign test over victims, or Mann and Whitney's where they are not paired.

    Unlike an interval of the mean, both hold for scores of any distribution, with infinite PSNR or all the same.
    """
    if (about := NO_LEAKAGE.get(base.metric)) is not None:
        return "", about
    if not found.count:
        return "", "no victim was attacked in both runs"
    told = f"{found.count} {found.unit}{'s' * (found.count != 1)}"
    enough = apart(base.metric, found.unit) and found.count >= FEWEST
    few = few_text(base.metric) if found.unit == "victim" else "too few to tell"
    if why_not:
        told = f"{told}, not paired, since {why_not}"
        return (_by_ranks(base, found), told) if enough else ("", f"{told}; {few}")
    told = f"more in {found.ahead}, less in {found.behind} of {told}"
    if not enough:
        seen = {(True, False): SEEN_MORE, (False, True): SEEN_LESS}
        return seen.get((found.ahead > 0, found.behind > 0), MIXED), f"{told}, {few}"
    return _by_signs(found), told


def _by_ranks(base: Summary, found: _Found) -> str:
    """Mann and Whitney's test; undecided where the difference of the means points the other way."""
    towards = found.mean if base.higher_is_better else -found.mean
    if found.test * towards < 0:
        return UNDECIDED
    return {1: MORE, -1: LESS}.get(found.test, NOT_SHOWN)


def _by_signs(found: _Found) -> str:
    """The sign test; equal scores count for neither direction."""
    for verdict, side in ((MORE, found.ahead), (LESS, found.behind)):
        if statistics.more_than_half(side, found.count, _EACH_SIDE):
            return verdict
    return NOT_SHOWN
