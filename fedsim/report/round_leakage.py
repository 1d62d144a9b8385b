"""Leakage round by round, where an attack read messages of several rounds; elsewhere a mean over rounds hides it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from fedsim.interfaces.metric import describe_metric
from fedsim.report import charts
from fedsim.report.charts import QUIET, Look
from fedsim.report.headline import reported_readings
from fedsim.report.summary import Summary, summarise
from fedsim.report.verdicts import ScoreReading


@dataclass(frozen=True, kw_only=True)
class RoundLeakage:
    """Scores of one attack by its first judged metric, apart for each round.

    Attributes:
        attack: its name, as its card has it.
        metric: the metric.
        rounds: by round its summary over the victims of this round, in order; at least two.
    """

    attack: str
    metric: str
    rounds: Mapping[int, Summary]

    @property
    def sentence(self) -> str:
        """Say in which round the attack got most, and in which least; all rounds where there are few."""
        facts = describe_metric(self.metric)
        values = {}
        for number, item in self.rounds.items():
            is_exact = item.mean >= facts.exact_from
            values[number] = "exact" if is_exact else f"{item.mean:.4g} {facts.unit}".rstrip()
        if len(values) <= _MAX_LISTED:
            listed = ", ".join(f"{value} in round {number}" for number, value in values.items())
            return f"{facts.title} by round: {listed}."
        sign = 1 if facts.higher_is_better else -1
        ranked = sorted(self.rounds, key=lambda number: sign * self.rounds[number].mean)
        least, most = ranked[0], ranked[-1]
        return (
            f"By {facts.title}, of {len(values)} attacked rounds, round {most} leaks most ({values[most]}),"
            f" round {least} least ({values[least]})."
        )


_MAX_LISTED = 3
"""Most rounds that a sentence lists."""


def split_by_round(all_readings: Sequence[ScoreReading], rows: Sequence[Mapping[str, str]]) -> dict[str, RoundLeakage]:
    """Return by attack its scores apart for each round, where it has scores of at least two.

    Args:
        all_readings: readings of all scores.
        rows: rows of `scores.csv`.
    """
    leakages = {}
    for attack, readings in reported_readings(all_readings).items():
        if not readings:
            continue
        pooled = readings[0].summary
        by_round: dict[int, list[Mapping[str, str]]] = {}
        for row in rows:
            is_pooled = (row["attack"], row["variant"]) == pooled.attack_key and row["metric"] == pooled.metric
            if is_pooled and row["round"].isdigit():  # one attack on several rounds at once says `1-10`
                by_round.setdefault(int(row["round"]), []).append(row)
        summaries = {}
        for number in sorted(by_round):
            (item,) = summarise(by_round[number])
            if not item.missing and math.isfinite(item.mean):
                summaries[number] = item
        if len(summaries) > 1:
            leakages[attack] = RoundLeakage(attack=attack, metric=pooled.metric, rounds=summaries)
    return leakages


def draw_rounds(leakages: Mapping[str, RoundLeakage]) -> list[Markup]:
    """Draw a chart for each metric: a curve over rounds for each attack, and one of the best guess.

    The band is the 95 % interval over the victims of the round, where there is one.
    """
    drawn = []
    for metric in dict.fromkeys(leakage.metric for leakage in leakages.values()):
        facts = describe_metric(metric)
        best = max if facts.higher_is_better else min
        curves = []
        floors: dict[int, float] = {}
        for number, leakage in enumerate(leakages.values()):
            if leakage.metric == metric:
                curves.append(_draw_attack(leakage, Look(number)))
                for key, item in leakage.rounds.items():
                    if math.isfinite(item.floor):
                        floors[key] = best(floors.get(key, item.floor), item.floor)
        if floors:
            rounds = sorted(floors)
            levels = [floors[number] for number in rounds]
            curves.append(charts.Curve(name="best guess", look=QUIET, x=rounds, y=levels))
        label = f"mean {facts.title}" + (f" ({facts.unit})" if facts.unit else "")
        drawn.append(
            charts.draw_curves(f"{facts.title} by attacked round", curves, xlabel="round", ylabel=label, legend=True)
        )
    return drawn


def _draw_attack(leakage: RoundLeakage, look: Look) -> charts.Curve:
    """Return the curve of an attack, with a band where each round has an interval."""
    items = list(leakage.rounds.values())
    lows, highs = np.array([item.low for item in items]), np.array([item.high for item in items])
    has_band = bool(np.isfinite([lows, highs]).all()) and all(item.unit == "victim" for item in items)
    return charts.Curve(
        name=leakage.attack,
        look=look,
        x=list(leakage.rounds),
        y=[item.mean for item in items],
        low=lows if has_band else (),
        high=highs if has_band else (),
    )
