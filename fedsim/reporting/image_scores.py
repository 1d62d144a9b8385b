"""The score of each single example, out of `image-scores.csv`, and which examples an attack got best and worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.auditing.scores import IMAGES
from fedsim.experiments.run_folder import RunFolder, read_rows

Key = tuple[str, str, str, str, str]
"""Which finding: title and variant of the attack, round, victim and random start."""
Values = Mapping[Key, Mapping[str, Sequence[float]]]
"""By finding and metric, the value of each example; NaN where there is none."""
CLOSENESS = {
    "psnr": True, "class_psnr": True, "ssim": True, "class_ssim": True, "lpips": False, "columns_right": True,
    "mse": False, "recover_rate": True, "tokens_found": True, "words_found": True,
}  # fmt: skip
"""Metrics of single examples or sets of words, in the order in which one is taken; whether higher is closer."""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """The example that an attack got best, worst, or as well as half of all others.

    Attributes:
        rank: `best`, `median` or `worst`.
        key: of which finding.
        image: its place among the examples of the finding.
        metric: by which.
        value: by that metric.
    """

    rank: str
    key: Key
    image: int
    metric: str
    value: float


def key_of(about: Mapping[str, Any]) -> Key:
    """Of a finding, by what it says of itself, or of a row of `scores.csv` or `image-scores.csv`."""
    title, variant, number, victim, repeat = (
        about[name] for name in ("attack", "variant", "round", "victim", "repeat")
    )
    return str(title), str(variant), str(number), str(victim), str(repeat)


def read(folder: RunFolder) -> Values:
    """All of them; none where nothing was scored.

    Raises:
        RunError: they are not such as an audit writes.
    """
    found: dict[Key, dict[str, dict[int, float]]] = {}
    for row in read_rows(folder.images, IMAGES, ("value", "image")):
        if row["metric"] in CLOSENESS:
            values = found.setdefault(key_of(row), {}).setdefault(row["metric"], {})
            values[int(float(row["image"]))] = float(row["value"])
    return {key: {metric: _listed(own) for metric, own in metrics.items()} for key, metrics in found.items()}


def with_sets(values: Values, rows: Iterable[Mapping[str, str]]) -> Values:
    """`values`, and how many words were found by each finding: where these are a set, the finding is one example.

    Args:
        rows: of `scores.csv`.
    """
    sets = {key_of(row): float(row["value"]) for row in rows if row["metric"] == "words_found" and not row["missing"]}
    return {
        key: {**values.get(key, {}), **({"words_found": [sets[key]]} if key in sets else {})}
        for key in dict.fromkeys([*values, *sets])
    }


def _listed(values: Mapping[int, float]) -> list[float]:
    return [values.get(place, math.nan) for place in range(max(values) + 1)]


def extremes(values: Values, made: tuple[str, str], first: str = "") -> list[Extreme]:
    """The best, the median and the worst example of an attack over all its findings; fewer where it has fewer.

    Examples with equal values are ranked by the other metrics, in the order of `CLOSENESS`.

    Args:
        values: of all attacks.
        made: title and variant of the attack.
        first: the metric to take if single examples have it, otherwise the first of `CLOSENESS` that they have.
    """
    own = {key: metrics for key, metrics in values.items() if key[:2] == made}
    known = {metric for metrics in own.values() for metric in metrics}
    metric = next((name for name in (first, *CLOSENESS) if name in known), None)
    if metric is None:
        return []
    others = [name for name in CLOSENESS if name in known and name != metric]

    def rank(item: tuple[float, Key, int]) -> tuple[object, ...]:
        found = [item[0], *(_value(own[item[1]], name, item[2]) for name in others)]
        signs = [-1 if CLOSENESS[name] else 1 for name in (metric, *others)]
        return *(sign * value for sign, value in zip(signs, found, strict=True)), item[1:]

    ranked = sorted(_each(own, metric), key=rank)
    places = dict.fromkeys([0, len(ranked) // 2, len(ranked) - 1])
    names = ["best", "median", "worst"] if len(places) == 3 else ["best", "worst"]
    return [
        Extreme(rank=name, key=ranked[place][1], image=ranked[place][2], metric=metric, value=ranked[place][0])
        for name, place in zip(names, places, strict=False)
    ]


def _value(metrics: Mapping[str, Sequence[float]], name: str, place: int) -> float:
    """0 where the example has none: NaN cannot be ranked."""
    values = metrics.get(name, ())
    return values[place] if place < len(values) and not math.isnan(values[place]) else 0.0


def _each(own: Values, metric: str) -> Iterable[tuple[float, Key, int]]:
    """Value, finding and place of each example that has one."""
    for key, metrics in own.items():
        for place, value in enumerate(metrics.get(metric, ())):
            if not math.isnan(value):
                yield value, key, place
