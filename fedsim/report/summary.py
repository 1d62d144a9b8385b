"""Summaries of scores: one for each attack and metric, with a confidence interval.

What is concluded from them is decided by `fedsim.report.verdicts` alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.evaluation import statistics
from fedsim.audit.variants import name_variants
from fedsim.base.errors import format_percent, number_of
from fedsim.interfaces.metric import describe_metric

EXACT = "exact"
"""The metric that is the share of exact examples; and the word for values of other metrics where that is 1."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Scores of one attack by one metric over all its victims.

    Further rounds of a victim, and further random starts on an update, say nothing about another victim, so they are
    averaged first. Only where there is one victim is the interval over its rounds, and only where there is one update
    is it over the random starts. Where victims are compared with one another there is none, see `are_independent`.

    Attributes:
        attack: its name, which distinguishes it from the others.
        attack_key: its title and variant, see `fedsim.audit.variants`.
        count: number of victims, or of updates where there is but one victim, or of random starts
            where there is but one update.
        unit: what is counted, `victim`, `round` or `start`.
        mean: mean score, each the mean over a victim's images; NaN where `missing`.
        low: where the 95 % confidence interval of `mean` begins, see `interval`; NaN where there is none.
        high: where it ends.
        floor: mean of the floors.
        floor_guess: which guess set the floor most often.
        nearest: mean score of the public examples closest to the true ones, NaN where none are known.
        gain: mean advantage over the floor, counted towards leakage.
        num_beyond: how many of `count` are beyond their floor.
        num_missing: further victims, which have no score.
        why_missing: the reason of the first of them.
        ceiling: mean score of perfect findings, NaN where there is no bound.
        values: the score of each of `count`, by what is counted.
        floors: the floor of each.
        examples: the number of examples, records or candidates that each is about.
        settings: those that differ from the attack's defaults, as JSON.
        granted: names of the facts that the attack was handed.
        instrument: what the metric measured with, see `ExampleMetric.instrument`.
        num_in_doubt: findings whose scores may say less, or more, than they seem to.
        doubt: why, of the first of them.
        is_exact: whether a page says `exact` in place of the mean, see `finds_exact_only`.
        num_seeds: over how many seeds each victim's score is the mean.
    """

    attack: str
    attack_key: tuple[str, str]
    metric: str
    count: int
    unit: str
    mean: float
    low: float
    high: float
    floor: float
    floor_guess: str
    nearest: float
    gain: float
    num_beyond: int
    num_missing: int
    why_missing: str
    ceiling: float
    higher_is_better: bool
    missing: str
    values: Mapping[str, float]
    floors: Mapping[str, float]
    examples: Mapping[str, float]
    settings: str
    granted: frozenset[str]
    instrument: str
    num_in_doubt: int = 0
    doubt: str = ""
    is_exact: bool = False
    num_seeds: int = 1

    @property
    def knows_defenses(self) -> bool:
        """True for an adaptive attack, which knows the defenses of the clients."""
        return "defenses" in self.granted

    @property
    def name(self) -> str:
        """The metric's name in a text, with its unit."""
        return describe_metric(self.metric).label

    @property
    def short_name(self) -> str:
        """The metric's title in a sentence, which may list others by commas."""
        title, _, quality = describe_metric(self.metric).title.partition(", ")
        return f"{title} ({quality})" if quality else title

    @property
    def interval_text(self) -> str:
        """Mean and 95 % interval for a table whose header says that it is one, see `interval_text`."""
        return EXACT if self.is_exact else interval_text(self.mean, self.low, self.high)

    @property
    def explained_interval(self) -> str:
        """Mean and 95 % interval for a sentence, in which a share is a percentage."""
        if self.is_exact:
            return EXACT
        return explain_interval(self.mean, self.low, self.high, is_share=is_share(self.metric))

    @property
    def explained_floor(self) -> str:
        """Score of the best guess for a sentence, in which a share is a percentage."""
        return explain_interval(self.floor, is_share=is_share(self.metric))

    @property
    def count_text(self) -> str:
        """`n = count`, what is counted unless that is victims, and how many victims are without a score."""
        text = f"n = {self.count}" if self.unit == "victim" else f"n = {number_of(self.count, self.unit)}"
        return f"{text}, not computed for {self.num_missing}" if self.num_missing else text

    @property
    def text(self) -> str:
        """`mean ± margin (n = count)`, or why there is none."""
        return f"not computed: {self.missing}" if self.missing else f"{self.interval_text} ({self.count_text})"

    @property
    def floor_text(self) -> str:
        """The floor and the guess that sets it."""
        if self.missing:
            return ""
        return f"{self.floor:.4g} ({self.floor_guess})" if self.floor_guess else "none"

    @property
    def nearest_text(self) -> str:
        """The score of the nearest public examples, if there are any."""
        return f"{self.nearest:.4g}" if math.isfinite(self.nearest) else ""

    @property
    def doubt_text(self) -> str:
        """Why scores are in doubt, in one clause; `scores.csv` has the whole sentence."""
        if not self.num_in_doubt:
            return ""
        return f"in doubt for {number_of(self.num_in_doubt, 'finding')}: {self.doubt_reason}"

    @property
    def doubt_reason(self) -> str:
        """Why scores are in doubt, without how many are."""
        return self.doubt.partition("; ")[0]

    @property
    def direction(self) -> str:
        """Direction of more leakage: `higher` or `lower` scores."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def best_text(self) -> str:
        """The score of the best possible finding, or for local models that of the optimal local model."""
        if not math.isfinite(self.ceiling):
            return ""
        if reference := describe_metric(self.metric).reference:
            return f"{self.ceiling:.4g} by {reference}"
        return f"at {'most' if self.higher_is_better else 'least'} {self.ceiling:.4g}"


def enumerate_words(words: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> enumerate_words(["sme"]), enumerate_words(["sme", "dlg", "spear-ica"])
    ('sme', 'sme, dlg and spear-ica')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def join_titles(titles: Sequence[str]) -> str:
    """Join titles of attacks by commas, or by semicolons where a title contains a comma.

    >>> join_titles(["sme", "dlg"]), join_titles(["sme (iterations=10, rounds=2)", "dlg"])
    ('sme, dlg', 'sme (iterations=10, rounds=2); dlg')
    """
    return ("; " if any("," in title for title in titles) else ", ").join(titles)


def summarise(rows: Iterable[Mapping[str, Any]], names: Mapping[tuple[str, str], str] | None = None) -> list[Summary]:
    """Group rows of `scores.csv` by attack and metric, in order of appearance.

    One attack made with several settings is several attacks, whose names say what differs (`sme (iterations=10)`).
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in name_variants(rows, names):
        groups[str(row["attack"]), str(row["metric"])].append(row)
    summaries = {key: _summary(*key, group) for key, group in groups.items()}
    return [
        replace(item, is_exact=finds_exact_only(metric, item.values, exact.values if exact else {}))
        for (attack, metric), item in summaries.items()
        for exact in [summaries.get((attack, EXACT))]
    ]


def finds_exact_only(metric: str, values: Mapping[Any, float], exact_shares: Mapping[Any, float]) -> bool:
    """Return whether all claims are exact, by a metric whose value says no more than that then.

    A mean beyond what counts as exact is no proof: four of five victims with 135 dB outweigh one with 10.

    Args:
        metric: such as `psnr`.
        values: its values by what is counted, victims say.
        exact_shares: the share of exact examples, the metric `exact`, likewise; none where it was not computed.
    """
    is_judged = describe_metric(metric).exact_from < math.inf and len(values) > 0
    return is_judged and all(exact_shares.get(key) == 1 for key in values)


def _summary(attack: str, metric: str, group: list[Mapping[str, Any]]) -> Summary:
    # Victims count as units, or rounds or starts where there is one victim.
    computed = [row for row in group if not row["missing"]]
    unit, by_unit = mean_by_unit(computed, "value")
    floors_by_unit = mean_by_unit(computed, "floor")[1]
    values, floors = _array(by_unit), _array(floors_by_unit)
    guesses = [str(row["floor_guess"]) for row in computed]
    higher = str(group[0]["higher_is_better"]) == "True"
    victims_with_score = {str(row["victim"]) for row in computed}
    without_score = {str(row["victim"]): str(row["missing"]) for row in group} if computed else {}
    reasons = [reason for victim, reason in without_score.items() if victim not in victims_with_score]
    low, high = interval(metric, values, unit)
    gains = statistics.gains(values, floors, higher_is_better=higher)
    doubts = [row["doubt"] for row in computed if row.get("doubt")]  # sweeps and comparisons make rows without it
    return Summary(
        attack=attack,
        attack_key=(group[0]["title"], group[0]["variant"]),
        metric=metric,
        count=len(values),
        unit=unit,
        mean=statistics.mean(values),
        low=low,
        high=high,
        floor=statistics.mean(floors),
        floor_guess=max(guesses, key=guesses.count, default=""),
        nearest=statistics.mean(_array(mean_by_unit(computed, "nearest_public")[1])),
        gain=statistics.mean(gains),
        num_beyond=int((gains > 0).sum()),
        num_missing=len(reasons),
        why_missing=reasons[0] if reasons else "",
        ceiling=float(np.mean([float(row["ceiling"]) if row["ceiling"] != "" else math.nan for row in group])),
        higher_is_better=higher,
        missing="" if len(values) else str(group[0]["missing"]),
        values=by_unit,
        floors=floors_by_unit,
        examples=mean_by_unit(computed, "examples")[1],
        settings=str(group[0]["settings"]),
        granted=frozenset(str(group[0]["granted"]).split()),
        instrument=str(group[0]["instrument"]),
        num_in_doubt=len(doubts),
        doubt=doubts[0] if doubts else "",
    )


def mean_by_unit(rows: Iterable[Mapping[str, Any]], column: str) -> tuple[str, dict[str, float]]:
    """Return what is counted, and a value for each: victims; of one victim its rounds; of one update its starts."""
    # Scores of the random starts, by victim and round.
    victims: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        victims[str(row["victim"])][str(row["round"])].append(float(row[column]))
    # Mean over the starts of each update.
    means: dict[str, dict[str, float]] = {}
    for victim, updates in victims.items():
        means[victim] = {number: _mean(starts) for number, starts in updates.items()}
    if len(means) > 1:
        return "victim", {victim: _mean(list(updates.values())) for victim, updates in means.items()}
    for rounds in means.values():
        if len(rounds) > 1:
            return "round", rounds
    scores = [score for updates in victims.values() for starts in updates.values() for score in starts]
    return "start" if len(scores) > 1 else "victim", {str(number): score for number, score in enumerate(scores)}


def _mean(values: Sequence[float]) -> float:
    """Return the mean; of a single value, as most are, without the detour by NumPy."""
    return values[0] if len(values) == 1 else float(np.mean(values))


def _array(by_unit: Mapping[str, float]) -> NDArray[np.float64]:
    return np.array(list(by_unit.values()))


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of something."""
    return describe_metric(metric).is_share


def are_independent(metric: str, unit: str = "victim") -> bool:
    """Return whether the scores of the victims of one run by `metric` are independent.

    Those of rounds or of random starts of one victim are not. Nor are those of victims that are compared with one
    another: by the AUC of a property a message that is out of order costs its sender, and all of the other kind. An
    interval over such victims would hold the true mean in some 70 of 100 cases; other runs have to tell.
    """
    return unit == "victim" and describe_metric(metric).evidence != "compared victims"


def mean_deviation_by_chance(deviation: float, victims: float = math.inf) -> float:
    """Return how far the mean over victims deviates by chance, where each score of candidates has this deviation.

    All victims may share the candidates that are no members, of which half of the variance is.
    """
    return deviation * math.sqrt((1 + 1 / victims) / 2)


def difference_by_shared_candidates(metric: str, counts: Iterable[float]) -> float:
    """Return the standard error by which candidates that victims share move the difference of two means.

    It is infinite for a rate at a threshold that they set, and 0 for metrics without candidates.

    Args:
        counts: numbers of candidates of each victim.
    """
    facts = describe_metric(metric)
    if facts.evidence != "candidates":
        return 0.0
    count = round(min(counts))
    if facts.chance_tail(1.0, count) is not None:
        return math.inf
    return math.sqrt(2) * mean_deviation_by_chance(facts.chance_spread(count)[0])


def compares_victims(metric: str, unit: str) -> bool:
    """Return whether scores by `metric` are of victims of one run that are compared with one another.

    See `are_independent`.
    """
    return unit == "victim" and not are_independent(metric)


def explain_inconclusive(metric: str) -> str:
    """Return why nothing is concluded from victims."""
    return "too few to tell" if are_independent(metric) else "which are compared with one another"


def interval(metric: str, values: NDArray[np.float64], unit: str = "victim") -> tuple[float, float]:
    """Compute the 95 % confidence interval of a metric's mean, by `confidence_interval`.

    NaN where it is over victims of one run that are not independent, see `are_independent`.
    """
    if compares_victims(metric, unit):
        return math.nan, math.nan
    lowest, highest = describe_metric(metric).value_range
    return statistics.confidence_interval(values, share=is_share(metric), lowest=lowest, highest=highest)


_FEWEST_DIFFERENCES = 5
"""Fewest differences of shares that tell how much they vary."""


def difference_interval(
    metric: str, values: NDArray[np.float64], unit: str = "victim", level: float = statistics.CONFIDENCE
) -> tuple[float, float]:
    """Compute the confidence interval of the mean of paired differences of a metric, see `interval`.

    Differences of shares vary less than shares do: of five or more it is therefore Student's, unless all are equal.
    """
    if compares_victims(metric, unit):
        return math.nan, math.nan
    if not is_share(metric):
        return statistics.confidence_interval(values, level=level)
    # Differences of shares lie in [-1, 1].
    if len(values) >= _FEWEST_DIFFERENCES and np.ptp(values) > 0:
        return statistics.confidence_interval(values, lowest=-1.0, highest=1.0, level=level)
    low, high = statistics.confidence_interval((values + 1) / 2, share=True, level=level)
    return 2 * low - 1, 2 * high - 1


def interval_text(mean: float, low: float, high: float) -> str:
    """Format `mean ± margin`, or `mean (low to high)` where that is not symmetric; the mean alone without an interval.

    For tables alone, whose header or caption has to say that this is a 95 % interval.

    >>> interval_text(0.5, 0.4, 0.6), interval_text(0.9, 0.6, 1.0)
    ('0.5 ± 0.1', '0.9 (0.6 to 1)')
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{mean:.4g}"
    below, above = mean - low, high - mean
    if math.isclose(below, above, rel_tol=1e-6, abs_tol=1e-12):
        return f"{mean:.4g} ± {above:.2g}"
    return f"{mean:.4g} ({low:.2g} to {high:.2g})"


def explain_interval(mean: float, low: float = math.nan, high: float = math.nan, *, is_share: bool) -> str:
    """Format a mean and its 95 % interval for a sentence; the mean alone without an interval.

    >>> explain_interval(1.0, 0.48, 1.0, is_share=True)
    '100 % (95 % interval 48 to 100 %)'
    >>> explain_interval(15.24, 14.55, 15.93, is_share=False)
    '15.24 (95 % interval 14.6 to 15.9)'
    """
    text = format_percent(mean, ".3g") if is_share else f"{mean:.4g}"
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    interval = f"{100 * low:.3g} to {format_percent(high, '.3g')}" if is_share else f"{low:.3g} to {high:.3g}"
    return f"{text} (95 % interval {interval})"
