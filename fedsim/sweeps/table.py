"""The two tables of a sweep's folder: `sweep.csv`, a row for each score, and `cells.csv`, a row for each cell.

Both begin with a cell's place in the grid: the hashes of what the cell and its federation follow from, a column for
each axis (`training.local_epochs`, `defense` ...), which holds labels, then `seed` and `attack`. The `attack` is an
axis that every sweep has, so it has this one column.
"""

from __future__ import annotations

import csv
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from fedsim.errors import RunError
from fedsim.experiments.run_folder import as_csv
from fedsim.files import parse_json, write_text
from fedsim.recording.seals import check_signed, key, seal

TABLE, CELLS = "sweep.csv", "cells.csv"
SEAL = ".seal"
"""Ends the name of the file beside a table that holds its hash, signed where the sweep has a key."""
_TRIES = 20
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


@dataclass(frozen=True)
class Table:
    """What is in such a file.

    Attributes:
        axes: the columns of axes but for `attack`, in the order of the sweep file.
        rows: by column; missing values are empty texts.
        text: of the file.
    """

    axes: tuple[str, ...]
    rows: list[dict[str, str]]
    text: str = ""


def columns(axes: Sequence[str], rest: Sequence[str]) -> tuple[str, ...]:
    """All columns of a table; `rest` is `SCORES` or `STATES`."""
    return (*_FIRST, *axes, *_PLACE, *rest)


def write_table(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `sweep.csv` in one step.

    Raises:
        RunError: the folder cannot be written.
    """
    _write(folder / TABLE, as_csv(columns(axes, SCORES), rows))


def write_cells(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `cells.csv` in one step.

    Raises:
        RunError: the folder cannot be written.
    """
    _write(folder / CELLS, as_csv(columns(axes, STATES), rows))


def read_table(folder: Path) -> Table:
    """What `sweep.csv` in the folder of a sweep says.

    Raises:
        RunError: it is not there, is damaged, or is not what the sweep wrote.
    """
    return _read(folder / TABLE, SCORES)


def read_cells(folder: Path) -> Table:
    """What `cells.csv` in the folder of a sweep says.

    Raises:
        RunError: it is not there, is damaged, or is not what the sweep wrote.
    """
    return _read(folder / CELLS, STATES)


def _write(path: Path, text: str) -> None:
    """Write a table and its seal; in between, the seal holds for the table that was there as well, if it was ours."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        before = [hashlib.sha256(_sealed_text(path, tries=1).encode()).hexdigest()]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or somebody else's, which is not vouched for
        before = []
    for digests in ([digest, *before], [digest]):
        if len(digests) == 1:
            write_text(path, text)
        sealed = [*_identity(path), *digests]
        sealed_text = json.dumps({"seal": seal(json.dumps(sealed), key()), "sealed": sealed})
        write_text(path.with_name(path.name + SEAL), sealed_text + "\n")


def _identity(path: Path) -> list[str]:
    """Of which sweep a table is: that of another one has a seal, too."""
    return [path.resolve().parent.name, path.name]


def _sealed_text(path: Path, tries: int = _TRIES) -> str:
    """A table that is what its seal says; one that is written at this moment is read again."""
    for _ in range(tries):
        text, seal_path = path.read_bytes(), path.with_name(path.name + SEAL)
        if not seal_path.exists():
            raise ValueError(f"{seal_path.name} is missing, and nothing vouches for the table")
        said = parse_json(seal_path.read_bytes())
        check_signed(said["seal"], json.dumps(said["sealed"]))
        sweep, name, *digests = said["sealed"]
        if [sweep, name] == _identity(path) and hashlib.sha256(text).hexdigest() in digests:
            return text.decode()
        time.sleep(0.05)
    raise ValueError("it is not what the sweep wrote")


def _read(path: Path, rest: Sequence[str]) -> Table:
    try:
        text = _sealed_text(path)
        header, *lines = list(csv.reader(StringIO(text, newline=""), strict=True))
        axes = tuple(header[len(_FIRST) : len(header) - len(_PLACE) - len(rest)])
        if tuple(header) != columns(axes, rest):  # of another version
            raise ValueError(f"its columns are not {', '.join(columns(('...',), rest))}")
        rows = [dict(zip(header, line, strict=True)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: cannot be read ({reason}); the same `fedsim sweep` writes it again") from error
    return Table(axes, rows, text)
