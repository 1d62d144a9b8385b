"""Accuracy of the models of a sweep, and what a defense costs of it, paired by seed and by client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from fedsim.audit.evaluation import statistics
from fedsim.base.errors import format_percent
from fedsim.report.summary import enumerate_words
from fedsim.report.sweep_groups import MIN_SEEDS, Row, Unit, accuracy

_ROUNDING = 1e-9
"""Margins up to this are rounding errors of equal values."""


def describe_accuracy_change(rows: Sequence[Row], controls: Sequence[Row]) -> str:
    """Format the change of accuracy by the defense, paired by seed, and where clients hold out data by them too."""
    texts = []
    by_seed, control_by_seed = _accuracies(rows, "accuracy"), _accuracies(controls, "accuracy")
    if by_seed.keys() & control_by_seed.keys():
        texts.append(_points_text(by_seed, control_by_seed))
    by_client, control_by_client = _accuracies(rows, "client_accuracy"), _accuracies(controls, "client_accuracy")
    if by_client.keys() & control_by_client.keys():
        texts.append(f"of the attacked clients {_points_text(by_client, control_by_client)}")
    return "; ".join(texts)


def _accuracies(rows: Iterable[Row], column: str) -> dict[Unit, str]:
    """Return the accuracies by seed alone, or on what clients hold out, by victim and seed."""
    accuracies = {}
    for row in rows:
        if row[column]:
            accuracies["" if column == "accuracy" else row["victim"], row["seed"]] = row[column]
    return accuracies


def describe_mean_accuracy(rows: Sequence[Row]) -> str:
    """Format the mean accuracy over seeds with its interval, or with both values of two seeds.

    Where clients share no whole model, it is the mean of what attacked clients get by the models that they use.
    """
    (mean, low, high), seeds = accuracy(rows)
    if not seeds:
        accuracies = list(map(float, _accuracies(rows, "client_accuracy").values()))
        return f"of the attacked clients {format_percent(fmean(accuracies))}" if accuracies else ""
    text = format_percent(mean)
    if seeds >= MIN_SEEDS and math.isfinite(low):
        return f"{text} ({100 * low:.1f} to {format_percent(high)}, {seeds} seeds)"
    values = [f"{100 * float(value):.1f}" for value in _accuracies(rows, "accuracy").values()]
    return f"{text} ({enumerate_words(values)}, {seeds} seeds)" if seeds > 1 else f"{text} (1 seed)"


def _points_text(own: Mapping[Unit, str], without: Mapping[Unit, str]) -> str:
    changes = {unit: 100 * (float(own[unit]) - float(without[unit])) for unit in own if unit in without}
    mean, margin = statistics.mean_and_margin(changes)
    if len(changes) < MIN_SEEDS and margin > _ROUNDING:
        return f"{mean:+z.1f} points: {enumerate_words([f'{change:+z.1f}' for change in changes.values()])}"
    text = f"{mean:+z.1f} ± {margin:.1f}" if margin > _ROUNDING else f"{mean:+z.1f}"
    return f"{text} points"
