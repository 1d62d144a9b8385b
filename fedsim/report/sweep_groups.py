"""Scores of a sweep averaged over victims and seeds: one group for each attack, setting and metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.evaluation import statistics
from fedsim.audit.plan import ADAPTIVE
from fedsim.base.errors import number_of
from fedsim.interfaces.metric import describe_metric
from fedsim.report.summary import (
    EXACT,
    are_independent,
    difference_interval,
    finds_exact_only,
    interval,
    interval_text,
    is_share,
)

Labels = tuple[str, ...]
_Key = tuple[str, str, Labels]
"""Attack, whether it knows the defenses, and labels of the axes."""
Row = Mapping[str, str]
Unit = tuple[str, str]
"""A victim, and the seed of its federation."""
Estimate = tuple[float, float, float]
"""A mean, and where its 95 % interval begins and ends; NaN where there is none."""

MIN_VICTIMS = 5
"""Fewest victims whose differences of shares have Student's interval."""
MIN_SEEDS = 3
"""Fewest seeds from which it is estimated how much seeds vary; two values hardly tell."""


@dataclass(frozen=True, kw_only=True)
class ScoreGroup:
    """Scores of one attack by one metric, over all victims and seeds of one setting.

    Attributes:
        knows_defenses: whether it is the adaptive form of that attack.
        baseline: whether it counts as no attack, see `fedsim.report.verdicts.AttackTraits.baseline`.
        labels: of the axes, without attack and seed.
        mean: over victims and seeds, each the mean over rounds and random starts; may be infinite.
        low: where the 95 % interval of the mean begins; NaN where there is one value, or where one is not finite.
        floor: mean of what the best guess gets; NaN where there is none.
        gain: mean advantage over the floor, towards leakage.
        count: how many victims, and in how many seeds.
        failed: on how many victims, counted in each seed, the attack failed, or what it found could not be judged.
        missing: for how many others, counted likewise, this metric could not be computed.
        partial: of how many of those counted in `count` a round or random start has no score for either reason.
        is_exact: whether a page says `exact` in place of the mean, see `finds_exact_only`.
        accuracy: of the model, over seeds; NaN where it was not measured.
        href: of a run's report, the first seed's.
    """

    attack: str
    metric: str
    knows_defenses: bool
    baseline: bool
    labels: Labels
    mean: float
    low: float
    high: float
    floor: float
    gain: float
    count: tuple[int, int]
    failed: int
    missing: int
    partial: int
    is_exact: bool
    accuracy: Estimate
    href: str

    @property
    def attack_and_form(self) -> tuple[str, bool]:
        """Label and form of its attack, which tell it from others."""
        return self.attack, self.knows_defenses

    @property
    def name(self) -> str:
        """Name of the attack, marked where it is adaptive or a baseline."""
        adaptive = f" {ADAPTIVE}" if self.knows_defenses else ""
        baseline = " (baseline)" if self.baseline else ""
        return f"{self.attack}{adaptive}{baseline}"

    @property
    def text(self) -> str:
        """Mean and interval, as everywhere on the page; and how many victims are without a score."""
        text = EXACT if self.is_exact else interval_text(self.mean, self.low, self.high)
        gaps = []
        if self.failed:
            gaps.append(f"failed on {self.failed}")
        if self.missing:
            gaps.append(f"not computed for {self.missing}")
        if self.partial:
            gaps.append(f"some rounds or starts of {self.partial} without a score")
        return f"{text} ({', '.join(gaps)})" if gaps else text

    @property
    def tooltip(self) -> str:
        """Text of a tooltip: numbers of victims and seeds, and the floor."""
        floor = "no floor to compare with" if math.isnan(self.floor) else f"best guess {self.floor:.4g}"
        victims, seeds = self.count
        baseline = "; a baseline, not an attack" if self.baseline else ""
        return f"{number_of(victims, 'victim')}, {number_of(seeds, 'seed')}; {floor}{baseline}"


def group_scores(rows: Sequence[Row], axes: Sequence[str], metric: str) -> list[ScoreGroup]:
    """Group the scores by `metric` by attack and setting, in the order of the table."""
    scored: dict[_Key, list[Row]] = defaultdict(list)
    failed: dict[_Key, set[tuple[str, str]]] = defaultdict(set)
    missing: dict[_Key, set[tuple[str, str]]] = defaultdict(set)
    exact: dict[_Key, list[Row]] = defaultdict(list)
    for row in rows:
        key = row["attack"], row["knows_defenses"], tuple(row[axis] for axis in axes)
        victim_and_seed = row["victim"], row["seed"]
        if row["metric"] == EXACT and row["value"]:
            exact[key].append(row)
        if row["metric"] == "":
            failed[key].add(victim_and_seed)
        elif row["metric"] == metric and row["value"]:
            scored[key].append(row)
        elif row["metric"] == metric:
            missing[key].add(victim_and_seed)
    return [
        _group(key[-1], scored_rows, failed[key], missing[key], mean_by_victim_and_seed(exact[key], "value"))
        for key, scored_rows in scored.items()
    ]


def accuracy(rows: Iterable[Row]) -> tuple[Estimate, int]:
    """Compute the mean accuracy over seeds with its interval within [0, 1], and how many seeds measured it."""
    values = np.array(list({row["seed"]: float(row["accuracy"]) for row in rows if row["accuracy"]}.values()))
    return (statistics.mean(values), *statistics.confidence_interval(values, lowest=0.0, highest=1.0)), len(values)


def report_address(run: str) -> str:
    """Return the address of a run's report; empty where there is no run."""
    return quote(f"{run}/report.html") if run else ""


def _group(
    labels: Labels,
    rows: Sequence[Row],
    failed: set[tuple[str, str]],
    missing: set[tuple[str, str]],
    exact_shares: Mapping[Unit, float],
) -> ScoreGroup:
    first_row = rows[0]
    values, floors = mean_by_victim_and_seed(rows, "value"), mean_by_victim_and_seed(rows, "floor")
    mean = sum(values.values()) / len(values)
    low, high = score_interval(first_row["metric"], values)
    floor = sum(floors.values()) / len(floors) if floors else math.nan
    return ScoreGroup(
        attack=first_row["attack"],
        metric=first_row["metric"],
        knows_defenses=first_row["knows_defenses"] == "1",
        baseline=first_row["baseline"] == "1",
        labels=labels,
        mean=mean,
        low=low,
        high=high,
        floor=floor,
        gain=mean - floor if first_row["better"] == "higher" else floor - mean,
        count=(len({victim for victim, _ in values}), len({seed for _, seed in values})),
        failed=len(failed - values.keys()),
        missing=len(missing - failed - values.keys()),
        partial=len((failed | missing) & values.keys()),
        is_exact=finds_exact_only(first_row["metric"], values, exact_shares),
        accuracy=accuracy(rows)[0],
        href=report_address(first_row["run"]),
    )


def mean_by_victim_and_seed(rows: Iterable[Row], column: str) -> dict[Unit, float]:
    """Return by victim and seed the mean over rounds and random starts."""
    values: dict[Unit, list[float]] = defaultdict(list)
    for row in rows:
        if row[column]:
            values[row["victim"], row["seed"]].append(float(row[column]))
    return {key: sum(several) / len(several) for key, several in values.items()}


def score_interval(metric: str, values: Mapping[Unit, float]) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over victims and seeds, within the metric's range.

    Where only victims or only seeds vary it is that of a run's report, `summary.interval`. Where both do it is that of
    `mean_and_margin`; of a share, whose margin is too small where few values are equal, it includes that over victims.
    Of two seeds it is that which reaches over the intervals of both, see `_reach_over_both_seeds`, if that is narrower.
    Where victims of a run are compared with one another, see `are_independent`, it is that over seeds.
    """
    ends = _interval_over_units(metric, values, interval, describe_metric(metric).value_range)
    return _choose_narrower(ends, _reach_over_both_seeds(metric, values, score_interval))


def paired_interval(
    metric: str, differences: Mapping[Unit, float], level: float = statistics.CONFIDENCE
) -> tuple[float, float]:
    """Compute the interval of the mean of paired differences of a metric over victims and seeds, likewise.

    Differences of shares vary less than shares do. From five victims on it is therefore that of `mean_and_margin`,
    unless all differences are equal.
    """
    ends = _interval_of_differences(metric, differences, level)
    return _choose_narrower(ends, _reach_over_both_seeds(metric, differences, partial(paired_interval, level=level)))


def _interval_of_differences(metric: str, differences: Mapping[Unit, float], level: float) -> tuple[float, float]:
    lowest, highest = describe_metric(metric).value_range
    num_victims = len({victim for victim, _ in differences})
    if is_share(metric) and are_independent(metric) and num_victims >= MIN_VICTIMS:
        mean, margin = statistics.mean_and_margin(differences, level)
        if margin:
            return max(mean - margin, -1.0), min(mean + margin, 1.0)
    interval_of = partial(difference_interval, level=level)
    return _interval_over_units(metric, differences, interval_of, (lowest - highest, highest - lowest), level)


def _reach_over_both_seeds(
    metric: str,
    values: Mapping[Unit, float],
    interval_of_seed: Callable[[str, Mapping[Unit, float]], tuple[float, float]],
) -> tuple[float, float]:
    """Return where the intervals over the victims of each of two seeds begin and end.

    Two seeds hardly tell how much seeds vary: Student's interval over them reaches thirteen standard errors to either
    side. What each shows alone, both show together. The interval is about further victims in these two federations;
    that it holds the mean over all seeds is as likely only where seeds vary less than victims do, see
    `docs/explanation/verdicts.md`.
    It is NaN for more or fewer seeds, or where the victims of a seed have none.
    """
    seeds = dict.fromkeys(seed for _, seed in values)
    if len(seeds) != MIN_SEEDS - 1 or not are_independent(metric):
        return math.nan, math.nan
    intervals = []
    for seed in seeds:
        of_seed = {unit: value for unit, value in values.items() if unit[1] == seed}
        intervals.append(interval_of_seed(metric, of_seed))
    lows, highs = zip(*intervals, strict=True)
    return float(np.min(lows)), float(np.max(highs))


def _choose_narrower(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return the narrower of two intervals; the first one where the second is NaN."""
    width, other_width = (high - low for low, high in (first, second))
    return second if math.isnan(width) or other_width < width else first


def _interval_over_units(
    metric: str,
    values: Mapping[Unit, float],
    interval_of: Callable[[str, NDArray[np.float64], str], tuple[float, float]],
    value_range: tuple[float, float],
    level: float = statistics.CONFIDENCE,
) -> tuple[float, float]:
    if not values or not all(map(math.isfinite, values.values())):
        return math.nan, math.nan
    victims, seeds = _means(values, 0), _means(values, 1)
    if not are_independent(metric):
        return interval_of(metric, seeds, "seed")
    low, high = interval_of(metric, victims if len(victims) > 1 else seeds, "victim")
    if len(victims) == 1 or len(seeds) == 1:
        return low, high
    mean, margin = statistics.mean_and_margin(values, level)
    begin, end = max(mean - margin, value_range[0]), min(mean + margin, value_range[1])
    return (min(low, begin), max(high, end)) if is_share(metric) else (begin, end)


def _means(values: Mapping[Unit, float], part: int) -> NDArray[np.float64]:
    """Return the mean of each victim (part 0 of the key) or of each seed (part 1)."""
    groups: dict[str, list[float]] = defaultdict(list)
    for key, value in values.items():
        groups[key[part]].append(value)
    return np.array([np.mean(group) for group in groups.values()])
