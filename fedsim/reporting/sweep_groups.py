"""The scores of a sweep, averaged over victims and seeds: one group for each attack, setting and metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fedsim.auditing.plan import ADAPTIVE
from fedsim.evaluation import statistics
from fedsim.reporting.summary import apart, interval, interval_text, is_share, value_range

Labels = tuple[str, ...]
Row = Mapping[str, str]
Estimate = tuple[float, float, float]
"""A mean, and where its 95 % interval begins and ends; NaN where there is none."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The scores of one attack by one metric, of all victims and seeds of one setting.

    Attributes:
        attack: its label.
        knows_defenses: whether it is the adaptive form of that attack.
        baseline: whether it counts as no attack, see `fedsim.reporting.summary.Kind.baseline`.
        labels: of the axes, without attack and seed.
        mean: over victims and seeds, each the mean over rounds and random starts; may be infinite.
        low: where the 95 % interval of the mean begins; NaN where there is one value, or where one is not finite.
        high: where it ends.
        floor: mean of what the best guess gets; NaN where there is none.
        gain: mean advantage over the floor, towards leakage.
        count: how many victims, and in how many seeds.
        failed: on how many victims, counted in each seed, the attack failed, or what it found could not be judged.
        missing: for how many others, counted likewise, this metric could not be computed.
        partial: of how many of those counted in `count` a round or random start has no score for either reason.
        accuracy: of the model, over seeds; NaN where it was not measured.
        href: of a run's report, the first seed's.
    """

    attack: str
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
    accuracy: Estimate
    href: str

    @property
    def who(self) -> tuple[str, bool]:
        """What tells its attack from others."""
        return self.attack, self.knows_defenses

    @property
    def name(self) -> str:
        """The attack, and what has to be known of it."""
        return self.attack + f" {ADAPTIVE}" * self.knows_defenses + " (baseline)" * self.baseline

    @property
    def text(self) -> str:
        """Mean and interval, as everywhere on the page; and how many are without a score."""
        text = interval_text(self.mean, self.low, self.high)
        without = [f"failed on {self.failed}"] if self.failed else []
        without += [f"not computed for {self.missing}"] if self.missing else []
        without += [f"some rounds or starts of {self.partial} without a score"] if self.partial else []
        return f"{text} ({', '.join(without)})" if without else text

    @property
    def told(self) -> str:
        """What a tooltip adds."""
        floor = "no floor to compare with" if math.isnan(self.floor) else f"the best guess gets {self.floor:.4g}"
        victims, seeds = self.count
        baseline = "; a baseline, no attack" * self.baseline
        return f"{victims} victim{'s' * (victims != 1)}, {seeds} seed{'s' * (seeds != 1)}; {floor}{baseline}"


def groups(rows: Sequence[Row], axes: Sequence[str], metric: str) -> list[Group]:
    """One for each attack and setting that have scores by `metric`, in the order of the table."""
    found: dict[tuple[str, str, Labels], list[Row]] = defaultdict(list)
    failed: dict[tuple[str, str, Labels], set[tuple[str, str]]] = defaultdict(set)
    missing: dict[tuple[str, str, Labels], set[tuple[str, str]]] = defaultdict(set)
    for row in rows:
        place = row["attack"], row["knows_defenses"], tuple(row[axis] for axis in axes)
        who = row["victim"], row["seed"]
        if row["metric"] == "":
            failed[place].add(who)
        elif row["metric"] == metric and row["value"]:
            found[place].append(row)
        elif row["metric"] == metric:
            missing[place].add(who)
    return [_group(place[-1], some, failed[place], missing[place]) for place, some in found.items()]


def accuracy(rows: Iterable[Row]) -> tuple[Estimate, int]:
    """The mean over seeds with its interval, which stays within [0, 1]; and how many seeds measured it."""
    values = np.array(list({row["seed"]: float(row["accuracy"]) for row in rows if row["accuracy"]}.values()))
    return (statistics.mean(values), *statistics.interval(values, lowest=0.0, highest=1.0)), len(values)


def report_of(run: str) -> str:
    """The address of a run's report; empty where there is no run."""
    return quote(f"{run}/report.html") if run else ""


def _group(labels: Labels, rows: Sequence[Row], failed: set[tuple[str, str]], missing: set[tuple[str, str]]) -> Group:
    first = rows[0]
    values, floors = _by_victim(rows, "value"), _by_victim(rows, "floor")
    mean = sum(values.values()) / len(values)
    low, high = _interval(first["metric"], values)
    floor = sum(floors.values()) / len(floors) if floors else math.nan
    return Group(
        attack=first["attack"],
        knows_defenses=first["knows_defenses"] == "1",
        baseline=first["baseline"] == "1",
        labels=labels,
        mean=mean,
        low=low,
        high=high,
        floor=floor,
        gain=mean - floor if first["better"] == "higher" else floor - mean,
        count=(len({victim for victim, _ in values}), len({seed for _, seed in values})),
        failed=len(failed - values.keys()),
        missing=len(missing - failed - values.keys()),
        partial=len((failed | missing) & values.keys()),
        accuracy=accuracy(rows)[0],
        href=report_of(first["run"]),
    )


def _by_victim(rows: Iterable[Row], column: str) -> dict[tuple[str, str], float]:
    """By victim and seed, the mean over rounds and random starts."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[column]:
            found[row["victim"], row["seed"]].append(float(row[column]))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _interval(metric: str, values: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """The 95 % interval of the mean over victims and seeds, within the metric's range.

    Where only victims or only seeds vary it is that of a run's report, `summary.interval`. Where both do it is that of
    `mean_and_margin`; of a share, whose margin is too small where few values are equal, it includes that over victims.
    Where victims of a run are compared with one another, see `apart`, it is that over seeds.
    """
    if not all(map(math.isfinite, values.values())):
        return math.nan, math.nan
    victims, seeds = (_means(values, place) for place in (0, 1))
    if not apart(metric):
        return interval(metric, seeds, "seed")
    low, high = interval(metric, victims if len(victims) > 1 else seeds)
    if len(victims) == 1 or len(seeds) == 1:
        return low, high
    mean, margin = statistics.mean_and_margin(values)
    lowest, highest = value_range(metric)
    begin, end = max(mean - margin, lowest), min(mean + margin, highest)
    return (min(low, begin), max(high, end)) if is_share(metric) else (begin, end)


def _means(values: Mapping[tuple[str, str], float], place: int) -> NDArray[np.float64]:
    """Of each victim (0) or seed (1)."""
    found: dict[str, list[float]] = defaultdict(list)
    for key, value in values.items():
        found[key[place]].append(value)
    return np.array([np.mean(some) for some in found.values()])
