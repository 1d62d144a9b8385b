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
from fedsim.report.summary import EXACT, Summary, enumerate_words, summarise
from fedsim.report.verdicts import ScoreReading


@dataclass(frozen=True, kw_only=True)
class RoundLeakage:
    """Scores of one attack by its first judged metric, apart for each round.

    Attributes:
        rounds: by round its summary over the victims of this round, in order; at least two.
        without_score: rounds in which no victim has a score.
        of_same_victims: whether the scores of all rounds are of the same victims.
    """

    attack: str
    metric: str
    rounds: Mapping[int, Summary]
    without_score: Sequence[int]
    of_same_victims: bool

    @property
    def sentence(self) -> str:
        """Say which rounds were furthest beyond the best guess, and which least; all rounds where there are few."""
        sentences = [f"{self._describe_rounds()}."]
        if not self.of_same_victims:
            sentences.append("Rounds are of different victims.")
        if self.without_score:
            rounds = enumerate_words([str(number) for number in self.without_score])
            sentences.append(f"There is no score in round {rounds}.")
        return " ".join(sentences)

    def _describe_rounds(self) -> str:
        title = describe_metric(self.metric).title
        if len(self.rounds) <= _MAX_LISTED:
            listed = [f"{self._describe_score(number)} in round {number}" for number in self.rounds]
            return f"{title} by round: {', '.join(listed)}"
        # How far each round is beyond its own guess.
        gains = {number: item.gain for number, item in self.rounds.items() if not math.isnan(item.gain)}
        least, most = (choose(gains, key=gains.__getitem__) for choose in (min, max))
        count = len(self.rounds)
        if gains[least] == gains[most] or math.isclose(gains[least], gains[most], rel_tol=1e-6):
            return f"By {title}, all {count} attacked rounds are equally far from the best guess"
        if gains[most] <= 0:
            return f"By {title}, none of {count} attacked rounds is beyond the best guess"
        return (
            f"By {title}, of {count} attacked rounds, round {most} is furthest beyond the best guess"
            f" ({self._describe_score(most)}), round {least} least ({self._describe_score(least)})"
        )

    def _describe_score(self, number: int) -> str:
        """Return `31.2 dB where a guess gets 10 dB`."""
        facts, item = describe_metric(self.metric), self.rounds[number]
        value = EXACT if item.is_exact else f"{item.mean:.4g} {facts.unit}".rstrip()
        return f"{value} where a guess gets {item.floor:.4g}" if math.isfinite(item.floor) else value


_MAX_LISTED = 3
"""Most rounds that a sentence lists."""


def split_by_round(all_readings: Sequence[ScoreReading], rows: Sequence[Mapping[str, str]]) -> dict[str, RoundLeakage]:
    """Return by attack its scores apart for each round, where it has scores of at least two.

    Args:
        rows: rows of `scores.csv`.
    """
    leakages = {}
    for attack, readings in reported_readings(all_readings).items():
        if not readings:
            continue
        pooled = readings[0].summary
        by_round: dict[int, list[Mapping[str, str]]] = {}
        for row in rows:
            is_pooled = (row["attack"], row["variant"]) == pooled.attack_key and row["metric"] in {pooled.metric, EXACT}
            if is_pooled and row["round"].isdigit():  # one attack on several rounds at once says which
                by_round.setdefault(int(row["round"]), []).append(row)
        summaries, victims = {}, set()
        for number in sorted(by_round):
            item = next(item for item in summarise(by_round[number]) if item.metric == pooled.metric)
            if not item.missing and not math.isnan(item.mean):
                summaries[number] = item
                victims.add(frozenset(row["victim"] for row in by_round[number] if not row["missing"]))
        if len(summaries) > 1:
            leakages[attack] = RoundLeakage(
                attack=attack,
                metric=pooled.metric,
                rounds=summaries,
                without_score=[number for number in sorted(by_round) if number not in summaries],
                of_same_victims=len(victims) == 1,
            )
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
        curves = [curve for curve in curves if len(np.asarray(curve.x))]
        if not curves:
            continue
        label = f"mean {facts.title}" + (f" ({facts.unit})" if facts.unit else "")
        drawn.append(
            charts.draw_curves(f"{facts.title} by attacked round", curves, xlabel="round", ylabel=label, legend=True)
        )
    return drawn


def _draw_attack(leakage: RoundLeakage, look: Look) -> charts.Curve:
    """Return the curve of an attack, with a band if each round has an interval; its name has infinite scores."""
    finite = {number: item for number, item in leakage.rounds.items() if math.isfinite(item.mean)}
    infinite = [str(number) for number in leakage.rounds if number not in finite]
    items = list(finite.values())
    lows, highs = np.array([item.low for item in items]), np.array([item.high for item in items])
    has_band = bool(np.isfinite([lows, highs]).all()) and all(item.unit == "victim" for item in items)
    return charts.Curve(
        name=leakage.attack + (f", infinite in round {enumerate_words(infinite)}" if infinite else ""),
        look=look,
        x=list(finite),
        y=[item.mean for item in items],
        low=lows if has_band else (),
        high=highs if has_band else (),
    )
