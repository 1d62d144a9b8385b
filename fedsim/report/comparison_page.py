"""Page that compares runs: settings that differ, accuracy, scores paired by victim, pictures side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.base.files import write_text
from fedsim.base.grouping import group_by
from fedsim.report.charts import Curve, Look, draw_curves
from fedsim.report.differences import Difference, difference_text, explain_equality, score_beside_floor
from fedsim.report.html import render_page

_MAX_UPDATES = 3
"""Most updates whose pictures are shown of each attack."""
Pictures = Mapping[str, Mapping[str, bytes]]
"""PNGs by attack and update."""


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """Column of one run, see `fedsim.api.comparing.ComparedRun`."""

    name: str
    quality: Mapping[int, float]
    measured: str
    pictures: Pictures


def write_comparison_page(
    path: Path,
    columns: Sequence[RunColumn],
    settings: tuple[Mapping[str, Sequence[Any]], Sequence[str]],
    differences: Mapping[str, Sequence[Difference]],
    uncompared: Mapping[str, tuple[list[str], list[str], list[str]]],
    failures: Sequence[str],
) -> Path:
    """Write the page.

    Args:
        settings: those that are not the same in all, with a value for each run, and sentences on them.
        differences: by the name of each run but the first, how its scores differ from the first one's.
        uncompared: by the same, the attacks that only the first run scored, those that only this run did, and
        sentences on
            those that both scored, but in ways that are not compared.
    """
    groups = []
    for name, items in differences.items():
        groups.append((name, explain_equality(items), group_by(items, lambda item: item.attack), uncompared[name]))
    text = render_page(
        "comparison.html.j2",
        ("charts.js",),
        columns=columns,
        differing=settings[0],
        about_settings=settings[1],
        quality=_quality_charts(columns),
        groups=groups,
        pictures=_pictures_by_attack(columns),
        paired=all(item.paired for items in differences.values() for item in items),
        failures=failures,
        difference_text=difference_text,
        score_beside_floor=score_beside_floor,
    )
    write_text(path, text)
    return path


def _quality_charts(columns: Sequence[RunColumn]) -> list[Any]:
    """Draw a chart of each thing that was measured: accuracy, and loss where a run has nothing else."""
    charts = []
    for measured in dict.fromkeys(column.measured for column in columns if column.measured):
        lines = []
        for number, column in enumerate(columns):
            if column.measured == measured:
                x, y = list(column.quality), list(column.quality.values())
                lines.append(Curve(name=column.name, look=Look(number), x=x, y=y))
        title = (measured if " of " in measured else f"{measured} of the model").capitalize()
        charts.append(draw_curves(title, lines, xlabel="round", ylabel=measured, legend=True))
    return charts


def _pictures_by_attack(columns: Sequence[RunColumn]) -> dict[str, list[tuple[str, list[bytes | None]]]]:
    """Return by attack the first updates that have pictures, with the picture of each run; None where it has none."""
    pictures: dict[str, list[tuple[str, list[bytes | None]]]] = {}
    for attack in dict.fromkeys(attack for column in columns for attack in column.pictures):
        updates = dict.fromkeys(update for column in columns for update in column.pictures.get(attack, ()))
        rows = [(update, [column.pictures.get(attack, {}).get(update) for column in columns]) for update in updates]
        pictures[attack] = rows[:_MAX_UPDATES]
    return pictures
