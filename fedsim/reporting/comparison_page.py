"""The page that compares runs: settings that differ, accuracy, scores paired by victim, pictures side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.files import write_text
from fedsim.reporting.charts import Curve, Look, curves
from fedsim.reporting.differences import Difference, difference_text
from fedsim.reporting.html import page

_MOST_SHOWN = 3
"""Updates whose pictures are shown of each attack."""
Pictures = Mapping[str, Mapping[str, bytes]]
"""By attack and then by update, a PNG."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What the page needs of one run; see `fedsim.workflow.comparing.Side`."""

    name: str
    quality: Mapping[int, float]
    measured: str
    pictures: Pictures


def write_comparison_page(
    path: Path,
    columns: Sequence[Column],
    settings: tuple[Mapping[str, Sequence[Any]], Sequence[str]],
    found: Mapping[str, Sequence[Difference]],
    left: Mapping[str, tuple[list[str], list[str], list[str]]],
    failures: Sequence[str],
) -> Path:
    """Write the page.

    Args:
        path: the file.
        columns: the runs; the first is the one that the others are compared with.
        settings: those that are not the same in all, with a value for each run, and sentences that go with them.
        found: by the name of each run but the first, how its scores differ from the first one's.
        left: by the same, the attacks that only the first run scored, those that only this run did, and sentences on
            those that both scored, but in ways that are not compared.
        failures: a sentence for each run that could not be read.

    Raises:
        RunError: the file cannot be written.
    """
    text = page(
        "comparison.html.j2",
        ("charts.js",),
        columns=columns,
        differing=settings[0],
        about_settings=settings[1],
        quality=_quality(columns),
        groups=[(name, _by_attack(some), left[name]) for name, some in found.items()],
        pictures=_side_by_side(columns),
        paired=all(item.paired for some in found.values() for item in some),
        failures=failures,
        difference_text=difference_text,
    )
    write_text(path, text)
    return path


def _quality(columns: Sequence[Column]) -> list[Any]:
    """A chart of each thing that was measured: accuracy, and loss where a run has nothing else."""
    return [
        curves(
            f"{measured} of the model".capitalize(),
            [
                Curve(name=column.name, look=Look(place), x=list(column.quality), y=list(column.quality.values()))
                for place, column in enumerate(columns)
                if column.measured == measured
            ],
            xlabel="round",
            ylabel=measured,
            legend=True,
        )
        for measured in dict.fromkeys(column.measured for column in columns if column.measured)
    ]


def _by_attack(found: Sequence[Difference]) -> dict[str, list[Difference]]:
    groups: dict[str, list[Difference]] = {}
    for item in found:
        groups.setdefault(item.attack, []).append(item)
    return groups


def _side_by_side(columns: Sequence[Column]) -> dict[str, list[tuple[str, list[bytes | None]]]]:
    """By attack, the first updates of which a run has a picture, with that of each run; None where it has none."""
    shown: dict[str, list[tuple[str, list[bytes | None]]]] = {}
    for attack in dict.fromkeys(attack for column in columns for attack in column.pictures):
        updates = dict.fromkeys(update for column in columns for update in column.pictures.get(attack, ()))
        rows = [(update, [column.pictures.get(attack, {}).get(update) for column in columns]) for update in updates]
        shown[attack] = rows[:_MOST_SHOWN]
    return shown
