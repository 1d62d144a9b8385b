"""Entry of a sweep in an index, made of its tables and its sweep file."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.base.errors import RunError, number_of
from fedsim.federation.config import Config
from fedsim.report.index_entry import FAILED, FINISHED, UNFINISHED, IndexEntry
from fedsim.report.indexed_run import first_time
from fedsim.report.sweep_answer import answer_sweep
from fedsim.report.sweep_page import FILE, PAGE
from fedsim.sweeps.table import CELLS, TABLE, read_cells, read_table

_VARIES = "varies"
_CELL_STATES = {FAILED: "failed", UNFINISHED: "not done"}
"""State of a sweep to the state of a cell that makes it so."""


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / FILE).is_file() and ((folder / TABLE).is_file() or (folder / CELLS).is_file())


def describe_sweep(folder: Path, entry: IndexEntry) -> None:
    """Fill in what is known of a sweep."""
    entry.kind = "sweep"
    entry.page = PAGE if (folder / PAGE).is_file() else ""
    entry.time = first_time(folder / TABLE, folder / CELLS)
    try:
        tables = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / FILE}: cannot be read ({error}); the same `fedsim sweep` writes it again") from error
    scores, cells = read_table(folder), read_cells(folder)
    # What was run.
    entry.data = _find_value(tables, scores.axes, "data", "name")
    entry.model = _find_value(tables, scores.axes, "model", "name")
    entry.clients = _find_value(tables, scores.axes, "federation", "clients")
    entry.rounds = _find_value(tables, scores.axes, "federation", "rounds")
    entry.attacks = ", ".join(dict.fromkeys(row["attack"] for row in cells.rows))
    if "defense" in scores.axes:
        entry.defenses = number_of(len({row["defense"] for row in cells.rows}), "setting")
    # How far it came.
    counts = Counter(row["state"] for row in cells.rows)
    entry.state = FINISHED
    for state in (FAILED, UNFINISHED):
        number = counts[_CELL_STATES[state]]
        if number:
            entry.state = state if entry.state == FINISHED else entry.state
            entry.reasons.append(f"{number_of(number, 'cell')} {_CELL_STATES[state]}")
    # What leaked.
    answer = answer_sweep(scores.rows, cells.rows, scores.axes)
    entry.sentence, entry.guess = answer.lead, answer.guess
    for row in scores.rows:
        if row["accuracy"]:
            best = entry.accuracy if math.isfinite(entry.accuracy) else 0.0
            entry.accuracy = max(best, float(row["accuracy"]))


def _find_value(tables: Mapping[str, Any], axes: Sequence[str], table: str, key: str) -> str:
    """Return the value of a key that all cells share, by default that of its table."""
    if not {table, "case", f"{table}.{key}"}.isdisjoint(axes):
        return _VARIES
    default = getattr(Config.model_fields[table].default, key)
    return str(dict(tables.get(table, {})).get(key, default))
