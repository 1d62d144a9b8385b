"""Scores of single examples, from `image-scores.csv`, and which examples an attack reconstructed best and worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from fedsim.audit.scores import IMAGE_SCORE_COLUMNS
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.interfaces.metric import describe_metric, sort_metrics

FindingKey = tuple[str, str, str, str, str]
"""Key of a finding: title and variant of the attack, round, victim and random start."""
_KEY_COLUMNS = "attack", "variant", "round", "victim", "repeat"
ExampleScores = Mapping[FindingKey, Mapping[str, Sequence[float]]]
"""By finding and metric, the value of each example; NaN where there is none."""


@dataclass(frozen=True, kw_only=True)
class ExtremeExample:
    """Example that an attack reconstructed best, worst, or as well as half of all others.

    Attributes:
        rank: `best`, `median` or `worst`.
        key: key of its finding.
        image: its number among the examples of the finding.
        metric: the metric by which it is ranked.
        value: its value by that metric.
    """

    rank: str
    key: FindingKey
    image: int
    metric: str
    value: float


def finding_key(about: Mapping[str, Any]) -> FindingKey:
    """Return the key of a finding, from its metadata or from a row of `scores.csv` or `image-scores.csv`."""
    title, variant, number, victim, repeat = (about[name] for name in _KEY_COLUMNS)
    return str(title), str(variant), str(number), str(victim), str(repeat)


def sort_by_preference(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that rank examples, or findings as a whole, the preferred one first.

    >>> sort_by_preference(["mse", "exact", "ssim"])
    ['ssim', 'mse']
    """
    return sort_metrics(name for name in metrics if describe_metric(name).ranks_examples)


def read_example_scores(folder: RunFolder) -> ExampleScores:
    """Read the scores of all examples; none where nothing was scored."""
    scores: dict[FindingKey, dict[str, dict[int, float]]] = {}
    rows = read_rows(folder.images, IMAGE_SCORE_COLUMNS, ("value",), ("image",))
    for (*key, metric), finding_rows in groupby(rows, itemgetter(*_KEY_COLUMNS, "metric")):
        if describe_metric(metric).ranks_examples:
            title, variant, number, victim, repeat = key
            by_example = scores.setdefault((title, variant, number, victim, repeat), {}).setdefault(metric, {})
            by_example.update((int(row["image"]), float(row["value"] or "nan")) for row in finding_rows)
    return {
        key: {metric: _as_list(by_example) for metric, by_example in metrics.items()} for key, metrics in scores.items()
    }


def add_whole_findings(values: ExampleScores, rows: Iterable[Mapping[str, str]]) -> ExampleScores:
    """Add the scores by metrics of all examples together that rank findings: a finding is one example then.

    An attack that claims a set of words is ranked by how many of them are right.
    """
    extended = {key: dict(metrics) for key, metrics in values.items()}
    for row in rows:
        facts = describe_metric(row["metric"])
        if facts.ranks_examples and not facts.of_examples and not row["missing"]:
            extended.setdefault(finding_key(row), {})[row["metric"]] = [float(row["value"])]
    return extended


def _as_list(values: Mapping[int, float]) -> list[float]:
    return [values.get(number, math.nan) for number in range(max(values) + 1)]


def extreme_examples(values: ExampleScores, attack_key: tuple[str, str], first: str = "") -> list[ExtremeExample]:
    """Return the best, the median and the worst example of an attack over all its findings; fewer where it has fewer.

    Examples with equal values are ranked by the other metrics, in the order of preference.

    Args:
        first: the metric to take if single examples have it, otherwise the preferred one of those that they have.
    """
    findings = {key: metrics for key, metrics in values.items() if key[:2] == attack_key}
    available = sort_by_preference({metric for metrics in findings.values() for metric in metrics})
    if not available:
        return []
    metric = first if first in available else available[0]
    tie_breakers = [name for name in available if name != metric]
    signs = [-1 if describe_metric(name).higher_is_better else 1 for name in (metric, *tie_breakers)]

    def rank(example: tuple[float, FindingKey, int]) -> tuple[object, ...]:
        value, key, number = example
        scores = [value, *(_value_or_zero(findings[key], name, number) for name in tie_breakers)]
        return *(sign * score for sign, score in zip(signs, scores, strict=True)), (key, number)

    ranked = sorted(_scored_examples(findings, metric), key=rank)
    positions = dict.fromkeys([0, len(ranked) // 2, len(ranked) - 1])
    names = ["best", "median", "worst"] if len(positions) == 3 else ["best", "worst"]
    chosen = []
    for name, position in zip(names, positions, strict=False):
        value, key, number = ranked[position]
        chosen.append(ExtremeExample(rank=name, key=key, image=number, metric=metric, value=value))
    return chosen


def _value_or_zero(metrics: Mapping[str, Sequence[float]], name: str, number: int) -> float:
    """Return the value of an example; 0 where it has none, since NaN cannot be ranked."""
    values = metrics.get(name, ())
    return values[number] if number < len(values) and not math.isnan(values[number]) else 0.0


def _scored_examples(findings: ExampleScores, metric: str) -> Iterable[tuple[float, FindingKey, int]]:
    """Yield value, finding and number of each example that has a value."""
    for key, metrics in findings.items():
        for number, value in enumerate(metrics.get(metric, ())):
            if not math.isnan(value):
                yield value, key, number
