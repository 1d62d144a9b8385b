"""Studies that end when their time is up, and go on from the rows that they have kept."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def read(path: Path) -> list[dict[str, str]]:
    """All rows that were kept."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def go_on(
    cells: Iterable[C],
    measured: Callable[[C], dict[str, Any]],
    path: Path,
    columns: Sequence[str],
    minutes: float,
    *,
    rounded: Callable[[float], float],
    told: Sequence[str] = (),
) -> None:
    """Measure and keep the cells that have no row yet, one after another, until the time is up.

    Args:
        cells: dataclasses, whose fields are the first columns.
        measured: the row of a cell.
        path: of the table.
        columns: of the table.
        minutes: no cell is begun after so many.
        rounded: what is kept of a float.
        told: the columns that are printed, as they are measured; all where none is named.
    """
    started = time.monotonic()
    rows = read(path)
    for cell in cells:
        own = dict(zip((field.name for field in fields(cell)), map(str, astuple(cell)), strict=True))
        if any(own.items() <= row.items() for row in rows):
            continue
        if time.monotonic() - started > 60 * minutes:
            print("time is up; run it again to go on")
            return
        row = measured(cell)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow({name: rounded(v) if isinstance(v, float) else v for name, v in row.items()})
        print(*(f"{name} {row[name]}" for name in told or row), flush=True)
