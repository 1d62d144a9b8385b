"""The two tables of a sweep's folder: `sweep.csv`, a row for each score, and `cells.csv`, a row for each cell.

Both begin with a cell's place in the grid: the hashes of what the cell and its federation follow from, a column for
each axis (`training.local_epochs`, `defense` ...), which holds labels, then `seed` and `attack`. The `attack` is an
axis that every sweep has, so it has this one column.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.errors import RunError
from fedsim.experiments.run_folder import as_csv
from fedsim.files import write_text

TABLE, CELLS = "sweep.csv", "cells.csv"
_FIRST, _PLACE = ("cell", "federation"), ("seed", "attack")
SCORES = (
    "knows_defenses", "baseline", "victim", "round", "repeat", "metric", "value", "floor", "ceiling", "better",
    "accuracy", "proved_epsilon", "measured_epsilon", "bytes", "seconds", "run",
)  # fmt: skip
"""The columns of `sweep.csv` after those of the place.

`knows_defenses` is 1 where the adversary knows the clients' defenses, `baseline` 1 where the attack is none, because it
reads a model as it was sent or one that only the evaluator has; `round` is the attacked round or `first-last`;
`value`, `floor` and `ceiling` are those of the run's `scores.csv`, empty where there is none; where the attack failed
on a victim, or what it found could not be judged, a row says so by an empty `metric`; `better` is `higher` or
`lower`, from the adversary's point of view; `accuracy` is that of the federation's last evaluation, in [0, 1];
`proved_epsilon` the smallest epsilon that a defense of the victim proves after the last round, infinite where it proves
nothing, empty without such a defense; `measured_epsilon` the largest lower bound, by canaries; `bytes` the mean that a
client sent in a round; `seconds` the time of the attack; `run` the cell's run folder, relative to the sweep's.
"""
STATES = ("state", "reason", "seconds", "run")
"""The columns of `cells.csv` after those of the place: the `seconds` are of the whole cell, without its federation."""
State = Literal["done", "failed", "does not apply", "not done"]
NUMBERS = ("value", "floor", "ceiling", "accuracy", "proved_epsilon", "measured_epsilon", "bytes", "seconds")
"""Columns of `sweep.csv` that hold a number or nothing."""


@dataclass(frozen=True)
class Table:
    """What is in such a file.

    Attributes:
        axes: the columns of axes but for `attack`, in the order of the sweep file.
        rows: by column; missing values are empty texts.
    """

    axes: tuple[str, ...]
    rows: list[dict[str, str]]


def columns(axes: Sequence[str], rest: Sequence[str]) -> tuple[str, ...]:
    """All columns of a table; `rest` is `SCORES` or `STATES`."""
    return (*_FIRST, *axes, *_PLACE, *rest)


def write_table(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `sweep.csv` in one step.

    Raises:
        RunError: the folder cannot be written.
    """
    write_text(folder / TABLE, as_csv(columns(axes, SCORES), rows))


def write_cells(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `cells.csv` in one step.

    Raises:
        RunError: the folder cannot be written.
    """
    write_text(folder / CELLS, as_csv(columns(axes, STATES), rows))


def read_table(folder: Path) -> Table:
    """What `sweep.csv` in the folder of a sweep says.

    Raises:
        RunError: it is not there, or is damaged.
    """
    return _read(folder / TABLE, SCORES, NUMBERS)


def read_cells(folder: Path) -> Table:
    """What `cells.csv` in the folder of a sweep says.

    Raises:
        RunError: it is not there, or is damaged.
    """
    return _read(folder / CELLS, STATES, ("seconds",))


def _read(path: Path, rest: Sequence[str], numbers: Sequence[str]) -> Table:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = list(csv.reader(file, strict=True))
        axes = tuple(header[len(_FIRST) : len(header) - len(_PLACE) - len(rest)])
        if tuple(header) != columns(axes, rest):
            raise ValueError(f"its columns are not {', '.join(columns(('...',), rest))}")
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        for place, row in enumerate(rows, 2):
            for name in numbers:
                _check_number(row[name], f"line {place}: {name}")
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: cannot be read ({reason}); the same `fedsim sweep` writes it again") from error
    return Table(axes, rows)


def _check_number(text: str, where: str) -> None:
    try:
        float(text or 0)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is no number") from None
