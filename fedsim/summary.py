"""Scores in short: one line per attack and metric, with a confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One metric of one attack over all its victims, rounds and repeats.

    Attributes:
        mean: mean over `count` scores, each the mean over a victim's images; NaN where `missing`.
        margin: half the width of the 95 % confidence interval of `mean` (Student's t); NaN for one score.
        error: standard error of `mean`; NaN for one score.
        floor: mean of the floors.
        floor_guess: which guess set the floor most often.
        ceiling: what a perfect finding would get, NaN where there is no bound.
    """

    attack: str
    metric: str
    count: int
    mean: float
    margin: float
    error: float
    floor: float
    floor_guess: str
    ceiling: float
    higher_is_better: bool
    missing: str

    @property
    def text(self) -> str:
        """`mean ± margin (n = count)`, or why there is none."""
        if self.missing:
            return f"not computed: {self.missing}"
        interval = f" ± {self.margin:.2g}" if math.isfinite(self.margin) else ""
        return f"{self.mean:.4g}{interval} (n = {self.count})"

    @property
    def floor_text(self) -> str:
        """The floor and the guess behind it."""
        return "" if self.missing else f"{self.floor:.4g} ({self.floor_guess})"

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
    values = np.array([float(row["value"]) for row in computed])
    floors = [float(row["floor"]) for row in computed]
    guesses = [str(row["floor_guess"]) for row in computed]
    # A perfect reconstruction has an infinite PSNR, about which no interval can be said.
    error = float(stats.sem(values)) if len(values) > 1 and np.isfinite(values).all() else math.nan
    return Summary(
        attack=attack,
        metric=metric,
        count=len(values),
        mean=float(values.mean()) if len(values) else math.nan,
        margin=error * float(stats.t.ppf(0.975, len(values) - 1)) if len(values) > 1 else math.nan,
        error=error,
        floor=float(np.mean(floors)) if floors else math.nan,
        floor_guess=max(guesses, key=guesses.count, default=""),
        ceiling=float(group[0]["ceiling"]) if group[0]["ceiling"] != "" else math.nan,
        higher_is_better=str(group[0]["higher_is_better"]) == "True",
        missing="" if len(values) else str(group[0]["missing"]),
    )
