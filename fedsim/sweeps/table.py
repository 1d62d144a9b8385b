"""The tables of a sweep: `sweep.csv`, with a row for each score, and `cells.csv`, for each cell.

Both start with the columns of a cell's grid point: the hashes of the inputs of the cell and of its
federation, a column of labels for each axis (`training.local_epochs`, `defense` ...), then `seed`
and `attack`. Every sweep has the axis `attack`, so its column has a fixed position.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from fedsim.base.errors import RunError, one_line
from fedsim.base.files import check_readable, parse_json, write_text
from fedsim.federation.run_folder import as_csv, check_count
from fedsim.recording.seals import require_seal, seal_text, signing_key

TABLE, CELLS = "sweep.csv", "cells.csv"
SEAL = ".seal"
"""Suffix of the file with a table's hash, which is signed where the sweep has a key."""
_MAX_TRIES = 20
"""Most attempts to read a table that is being written."""
_KEY_COLUMNS, _LAST_POINT_COLUMNS = ("cell", "federation", "control"), ("seed", "attack")
"""Columns of the grid point before and after those of the axes.

`control` is the key of the cell with the same settings and no defense: its own where it has none,
empty where there is no such cell.
"""
SCORES = (
    "knows_defenses", "baseline", "victim", "round", "repeat", "metric", "value", "floor", "floor_guess",
    "ceiling", "better", "examples", "doubt",
    "accuracy", "client_accuracy", "guess", "num_evaluated", "proved_epsilon", "measured_epsilon", "bytes",
    "seconds", "run",
)  # fmt: skip
"""Columns of `sweep.csv` after those of the grid point.

`knows_defenses` is 1 where the adversary knows the clients' defenses; `baseline` is 1 where the
attack only reads a model as it was sent or one that only the evaluator has; `round` is the attacked
round, or several as `1-3+7` or `1-5 by 2`; `value`, `floor` and `ceiling` are those of the run's `scores.csv`, empty
where there is none; where the attack failed on a victim, or its finding could not be scored,
`metric` is empty; `floor_guess` names the guess that sets the floor; `better` is `higher` or
`lower`, from the adversary's point of view; `examples` is the number of examples, records or
candidates that the score is about; `doubt` is why it may say less or more than it seems to; `accuracy`
is that of the federation's last evaluation, in [0, 1], on `num_evaluated` test examples, of which
`guess` is the share of the most frequent class, empty where clients share no whole model;
`client_accuracy` is that of the model that the victim uses, on the examples which it holds out, empty
where the last evaluation did not ask it; `proved_epsilon` is the smallest epsilon
that a defense of the victim proves after the last round, infinite where it proves none, empty
without such a defense, or where it is not proved against who attacks; `measured_epsilon` is the
largest lower bound by canaries; `bytes` is the mean size of a client's message in a round; `seconds`
is the duration of the attack; `run` is the cell's run folder, relative to the sweep's.
"""
STATES = ("added", "no_control", "defense_limits", "open_rounds", "state", "reason", "seconds", "run")
"""Columns of `cells.csv` after those of the grid point.

`added` is 1 where the sweep added the cell, as the control of cells with a defense; `no_control`
is why a cell with a defense has none; `defense_limits` names rounds in which a defense does not act,
and defenses that change examples; `open_rounds` are these rounds; `seconds` is the duration of the
cell without its federation.
"""
_FINITE_NUMBERS = ("examples", "accuracy", "client_accuracy", "bytes")
_NUMBERS = (*_FINITE_NUMBERS, "value", "floor", "ceiling", "guess", "proved_epsilon", "measured_epsilon")
"""Columns of `sweep.csv` with numbers, which may be missing."""
State = Literal["done", "failed", "does not apply", "not done", "skipped"]


@dataclass(frozen=True)
class SweepTableFile:
    """Contents of such a table.

    Attributes:
        axes: columns of axes except `attack`, in the order of the sweep file.
        rows: values by column; missing values are empty texts.
    """

    axes: tuple[str, ...]
    rows: list[dict[str, str]]
    text: str = ""


def table_columns(axes: Sequence[str], rest: Sequence[str]) -> tuple[str, ...]:
    """Return all columns of a table; `rest` is `SCORES` or `STATES`."""
    return (*_KEY_COLUMNS, *axes, *_LAST_POINT_COLUMNS, *rest)


def write_table(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `sweep.csv` in one step."""
    _write_sealed(folder / TABLE, as_csv(table_columns(axes, SCORES), rows))


def write_cells(folder: Path, axes: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `cells.csv` in one step."""
    _write_sealed(folder / CELLS, as_csv(table_columns(axes, STATES), rows))


def read_table(folder: Path) -> SweepTableFile:
    """Read `sweep.csv` in the folder of a sweep."""
    return _read_table(folder / TABLE, SCORES)


def read_cells(folder: Path) -> SweepTableFile:
    """Read `cells.csv` in the folder of a sweep."""
    return _read_table(folder / CELLS, STATES)


def _write_sealed(path: Path, text: str) -> None:
    """Write a table and its seal.

    While the table is replaced, the seal holds for the old table as well, if that is the sweep's
    own.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        old_digests = [hashlib.sha256(_read_sealed_text(path, tries=1).encode()).hexdigest()]
    except (OSError, ValueError, KeyError, TypeError):  # there is no old table, or it is not the sweep's
        old_digests = []
    _write_seal(path, [digest, *old_digests])
    write_text(path, text)
    _write_seal(path, [digest])


def _write_seal(path: Path, digests: Sequence[str]) -> None:
    """Write the seal of the table `path`, which holds for texts with one of these hashes."""
    sealed = [*_table_identity(path), *digests]
    sealed_text = json.dumps({"seal": seal_text(json.dumps(sealed), signing_key()), "sealed": sealed})
    write_text(path.with_name(path.name + SEAL), sealed_text + "\n")


def _table_identity(path: Path) -> list[str]:
    """Return the names that tell a table from another sweep's, which has a seal, too."""
    return [path.resolve().parent.name, path.name]


def _read_sealed_text(path: Path, tries: int = _MAX_TRIES) -> str:
    """Read a table that agrees with its seal; try again while it is being written."""
    for _ in range(tries):
        check_readable(path)
        text, seal_path = path.read_bytes(), path.with_name(path.name + SEAL)
        if not seal_path.exists():
            raise ValueError(f"{seal_path.name} is missing, and nothing vouches for the table")
        check_readable(seal_path)
        content = parse_json(seal_path.read_bytes())
        require_seal(content["seal"], json.dumps(content["sealed"]))
        sweep, name, *digests = content["sealed"]
        if [sweep, name] == _table_identity(path) and hashlib.sha256(text).hexdigest() in digests:
            return text.decode()
        time.sleep(0.05)
    raise ValueError("it is not what the sweep wrote")


def _read_table(path: Path, rest: Sequence[str]) -> SweepTableFile:
    try:
        text = _read_sealed_text(path)
        header, *lines = list(csv.reader(StringIO(text, newline=""), strict=True))
        axes = tuple(header[len(_KEY_COLUMNS) : len(header) - len(_LAST_POINT_COLUMNS) - len(rest)])
        if tuple(header) != table_columns(axes, rest):  # of another version
            raise ValueError(f"its columns are not {', '.join(table_columns(('...',), rest))}")
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        for row in rows:
            _check_row(row)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise RunError(f"{path}: cannot be read ({reason}); the same `fedsim sweep` writes it again") from error
    return SweepTableFile(axes, rows, text)


def _check_row(row: Mapping[str, str]) -> None:
    """Raise ValueError where a row of either table holds something else than numbers in their columns."""
    for name in (name for name in _NUMBERS if row.get(name)):
        number = float(row[name])
        if (math.isnan(number) and name != "guess") or (math.isinf(number) and name in _FINITE_NUMBERS):
            raise ValueError(f"has {row[name]!r} as {name}")
    if row.get("value"):
        float(row["examples"])  # means are taken of both
    counts = row.get("open_rounds", "").split()
    if row.get("accuracy") and row.get("guess"):
        counts.append(row["num_evaluated"])
    for count in counts:
        check_count(count)
