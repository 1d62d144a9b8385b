"""Scores in short: one line per attack and metric, with a confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One metric of one attack over all its victims.

    Other rounds of the same victim, and other random starts on the same update, are no new evidence
    about the next victim, so they are averaged first; only where there is but one victim do its
    rounds give the interval, and only where there is but one update do the starts.

    Attributes:
        count: number of victims, or of updates where there is but one victim, or of random starts
            where there is but one update.
        mean: mean score, each the mean over a victim's images; NaN where `missing`.
        margin: half the width of the 95 % confidence interval of `mean` (Student's t); NaN for one score.
        error: standard error of `mean`; NaN for one score.
        floor: mean of the floors.
        floor_guess: which guess set the floor most often.
        nearest: what the public example closest to each true one would get, NaN where none is known.
        gain: mean advantage over the floor, counted towards leakage.
        gain_margin: half the width of the 95 % confidence interval of `gain`, paired by victim.
        ceiling: mean of what perfect findings would get, NaN where there is no bound.
    """

    attack: str
    metric: str
    count: int
    mean: float
    margin: float
    error: float
    floor: float
    floor_guess: str
    nearest: float
    gain: float
    gain_margin: float
    ceiling: float
    higher_is_better: bool
    missing: str

    @property
    def interval_text(self) -> str:
        """`mean ± margin`."""
        return f"{self.mean:.4g}" + (f" ± {self.margin:.2g}" if math.isfinite(self.margin) else "")

    @property
    def text(self) -> str:
        """`mean ± margin (n = count)`, or why there is none."""
        return f"not computed: {self.missing}" if self.missing else f"{self.interval_text} (n = {self.count})"

    @property
    def floor_text(self) -> str:
        """The floor and the guess behind it."""
        return "" if self.missing else f"{self.floor:.4g} ({self.floor_guess})"

    @property
    def nearest_text(self) -> str:
        """What the nearest public examples get, if there are any."""
        return f"{self.nearest:.4g}" if math.isfinite(self.nearest) else ""

    @property
    def direction(self) -> str:
        """Which way is more leakage."""
        return "higher" if self.higher_is_better else "lower"


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[Summary]:
    """Group rows of `scores.csv` by attack and metric, in order of appearance."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[str(row["attack"]), str(row["metric"])].append(row)
    return [_summary(attack, metric, group) for (attack, metric), group in groups.items()]


def _summary(attack: str, metric: str, group: list[Mapping[str, Any]]) -> Summary:
    computed = [row for row in group if not row["missing"]]
    values, floors = _units(computed, "value"), _units(computed, "floor")
    guesses = [str(row["floor_guess"]) for row in computed]
    higher = str(group[0]["higher_is_better"]) == "True"
    mean, error, margin = _interval(values)
    gain, _, gain_margin = _interval((values - floors) * (1 if higher else -1))
    return Summary(
        attack=attack,
        metric=metric,
        count=len(values),
        mean=mean,
        margin=margin,
        error=error,
        floor=_interval(floors)[0],
        floor_guess=max(guesses, key=guesses.count, default=""),
        nearest=_interval(_units([row for row in computed if row.get("nearest_public")], "nearest_public"))[0],
        gain=gain,
        gain_margin=gain_margin,
        ceiling=float(np.mean([float(row["ceiling"]) if row["ceiling"] != "" else math.nan for row in group])),
        higher_is_better=higher,
        missing="" if len(values) else str(group[0]["missing"]),
    )


def _units(rows: list[Mapping[str, Any]], column: str) -> NDArray[np.float64]:
    """One value a victim; of a single victim one an update, of a single update one a random start."""
    victims: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        victims[str(row["victim"])][str(row["round"])].append(float(row[column]))
    means = [[np.mean(starts) for starts in updates.values()] for updates in victims.values()]
    if len(means) > 1:
        return np.array([np.mean(updates) for updates in means])
    if means and len(means[0]) > 1:
        return np.array(means[0])
    return np.array([start for updates in victims.values() for starts in updates.values() for start in starts])


def _interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean, standard error, and half the width of the 95 % interval; NaN where there is none.

    A perfect reconstruction has an infinite PSNR, about which no interval can be said.
    """
    if not len(values):
        return math.nan, math.nan, math.nan
    if len(values) == 1 or not np.isfinite(values).all():
        return float(values.mean()), math.nan, math.nan
    error = float(stats.sem(values))
    return float(values.mean()), error, error * float(stats.t.ppf(0.975, len(values) - 1))
