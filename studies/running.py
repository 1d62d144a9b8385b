"""Run the cells of a study, one after another, and keep their rows; what is kept is not run again."""

from __future__ import annotations

import csv
import io
import itertools
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

import fedsim
from fedsim.api.arguments import copy_tables
from fedsim.api.reproduce.papers import read_toml
from fedsim.base.errors import ConfigError
from fedsim.base.files import write_text
from fedsim.federation.experiment_file import config_of, load_config
from fedsim.federation.resolve import resolve
from fedsim.federation.settings import LAUNCH, changed_settings, flat_settings
from fedsim.federation.table import Table
from fedsim.federation.table_validation import validate_tables
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.grid import build_grid

STUDIES = Path(__file__).parent
RUNS = Path("runs/studies")
Row = dict[str, Any]


class PivotTable(Table):
    """Table of means over clients and seeds, each with its 95 % interval.

    Attributes:
        page: the page of docs/ that shows it between two marks.
        name: tells it from other tables of the study.
        where: values that rows have.
        lines: the columns that tell lines apart, by title.
        across: the columns that tell columns apart.
        floor: title of the floors, which stand before all else; none where it is empty.
        floor_is_a_line: they have a line, not a column.
        hide: values that are not shown.
        client: the column that tells victims apart.
    """

    page: str
    name: str = ""
    where: dict[str, str] = Field(default_factory=dict)
    lines: dict[str, str]
    across: list[str]
    floor: str = ""
    floor_is_a_line: bool = False
    hide: list[str] = Field(default_factory=list)
    client: str = "client"


class StudyFile(Table):
    """Contents of study.toml.

    Attributes:
        about: what the study asks, in two sentences.
        commit: of fedsim, that made results.csv.
        machine: which made it.
        minutes: of one core that all cells take together.
        page: of docs/, for the tables of study.py.
        number_format: of the numbers in results.csv.
        cells: grids; a value that is a list is an axis, and the first axis changes slowest.
        columns: those of results.csv; each is an axis, `seed`, `accuracy`, or a column of a cell's scores.csv.
        metrics: whose rows are kept.
        values: what is kept in the place of a label or a name.
        titles: what tables show for a value; lines and columns come in this order, others after them.
        table: tables for docs/.
    """

    about: str
    commit: str = ""
    machine: str = ""
    minutes: float | None = None
    page: str = ""
    number_format: str = ".4f"
    cells: list[dict[str, Any]] = Field(default_factory=list)
    columns: dict[str, str] = Field(default_factory=dict)
    metrics: list[str] = Field(default_factory=list)
    values: dict[str, str] = Field(default_factory=dict)
    titles: dict[str, str] = Field(default_factory=dict)
    table: list[PivotTable] = Field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """Folder of a study."""

    name: str
    file: StudyFile

    @classmethod
    def open(cls, name: str) -> Study:
        """Read study.toml of a study."""
        path = STUDIES / name / "study.toml"
        return cls(name, validate_tables(StudyFile, read_toml(path), f"studies/{name}/study.toml"))

    @property
    def folder(self) -> Path:
        """Return where all its files are."""
        return STUDIES / self.name

    @property
    def results(self) -> Path:
        """Return the file of its rows."""
        return self.folder / "results.csv"

    @cached_property
    def module(self) -> Any:
        """Return study.py, where there is one."""
        return import_module(f"studies.{self.name}.study") if (self.folder / "study.py").exists() else None

    def cells(self, only: Mapping[str, str] | None = None) -> list[Row]:
        """Return the cells of all grids, or those that study.py lists, each once, without what does not apply."""
        grids = (cell for grid in self.file.cells for cell in expand_grid(grid))
        known = self.module.cells() if hasattr(self.module, "cells") else grids
        applies = getattr(self.module, "applies", lambda cell: True)
        cells: dict[str, Row] = {}
        for cell in known:
            if applies(cell) and matches(cell, only or {}):
                cells.setdefault(repr(sorted(cell.items())), cell)
        return list(cells.values())


def study_names() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.parent.name for path in STUDIES.glob("*/study.toml"))


def expand_grid(grid: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every combination of the values of a grid.

    >>> list(expand_grid({"size": [1, 2], "attack": "dager"}))
    [{'size': 1, 'attack': 'dager'}, {'size': 2, 'attack': 'dager'}]
    """
    axes = [value if isinstance(value, list) else [value] for value in grid.values()]
    for values in itertools.product(*axes):
        yield dict(zip(grid, values, strict=True))


def matches(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a row has all wanted values, as text."""
    return all(str(row.get(column)) == str(value) for column, value in wanted.items())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows that were kept; none where there is no file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: Iterable[Row], number_format: str, cells: Iterable[Row] = ()) -> None:
    """Add rows to a file; a new one has the columns of all cells and rows, and one that lacks some is written anew."""
    shown = [{name: round_number(value, number_format) for name, value in row.items()} for row in rows]
    known = read_rows(path)
    columns = list(dict.fromkeys(name for row in (*known[:1], *cells, *shown) for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not known or columns != list(known[0]):
        text = io.StringIO()
        whole = csv.DictWriter(text, columns, lineterminator="\n")
        whole.writeheader()
        whole.writerows(known)
        write_text(path, text.getvalue())
    with path.open("a", newline="") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerows(shown)


def keep_records(path: Path, lines: Iterable[str]) -> Path:
    """Write the lines of a data set that a study makes, unless they are there; a sweep hashes the file."""
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path.resolve()


def round_number(value: Any, number_format: str) -> Any:
    """Round a float to the digits that are kept; leave anything else."""
    return float(format(value, number_format)) if isinstance(value, float) else value


def run_study(study: Study, path: Path, only: Mapping[str, str], minutes: float) -> None:
    """Run what has no rows yet, and add its rows to `path`."""
    if path == study.results and (warning := other_commit(study.file.commit, read_rows(path))):
        print(f"studies/{study.name}: {warning}")
    if (study.folder / "sweep.toml").exists():
        run_sweep(study, path, only)
    else:
        run_cells(study, path, only, minutes)
    if path == study.results:
        note_origin(study.folder / "study.toml")


def other_commit(commit: str, rows: list[dict[str, str]]) -> str:
    """Say that rows were made by another commit than this one; empty where they were not."""
    if not rows or not commit or current_commit().startswith(commit):
        return ""
    return (
        f"the rows in results.csv were made by commit {commit}, and this is {current_commit()}; what is done stays as "
        "it was, so name another file with --out to make all rows by this one"
    )


def current_commit() -> str:
    """Return the commit of this checkout, with + where files differ from it."""
    words = ["git", "-C", str(STUDIES), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def note_origin(path: Path) -> None:
    """Write the present commit and machine into study.toml."""
    text = path.read_text(encoding="utf-8")
    for key, value in (("commit", current_commit()), ("machine", f"{platform.machine()}, {platform.system()}")):
        text = re.sub(rf'^{key} = ".*"$', f'{key} = "{value}"', text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")


def run_cells(study: Study, path: Path, only: Mapping[str, str], minutes: float) -> None:
    """Measure the cells that have no row yet, until the time is up.

    Raises:
        ConfigError: a row has another value than its cell in one of the cell's columns, so it would not be found again.
    """
    assert study.module is not None
    is_row_of = getattr(study.module, "is_row_of", matches)
    started, every = time.monotonic(), study.cells()
    for cell in study.cells(only):
        if any(is_row_of(row, cell) for row in read_rows(path)):
            continue
        if time.monotonic() - started > 60 * minutes:
            print("the time is up; the same command goes on")
            return
        measured = study.module.measure(**cell)
        rows = [cell | row for row in (measured if isinstance(measured, list) else [measured])]
        for name, row in itertools.product(cell, rows):
            if row[name] != cell[name]:
                raise ConfigError(
                    f"studies/{study.name}: a row's column '{name}' has {row[name]}, and that of its cell has "
                    f"{cell[name]}; give one of them another name"
                )
        append_rows(path, rows, study.file.number_format, every)
        print(*(f"{name} {value}" for name, value in (rows or [cell])[0].items()), flush=True)


def run_sweep(study: Study, path: Path, only: Mapping[str, str]) -> None:
    """Run the sweep, and write the rows that the study keeps of it; the sweep itself makes no cell twice.

    Raises:
        ConfigError: cells failed, or some cells are chosen and the kept rows of all would be lost.
    """
    if only and path == study.results and read_rows(path):
        raise ConfigError(
            f"studies/{study.name}: {path.name} has the rows of all cells, and those of {dict(only)} would take their "
            "place; name another file with --out"
        )
    path_of_sweep = study.folder / "sweep.toml"
    chosen = [point.row for point in build_grid(read_sweep(path_of_sweep)).points if matches(point.row, only)]
    if not chosen:
        raise ConfigError(f"studies/{study.name}: no cell is {dict(only)}; fedsim sweep --dry-run lists them")
    changes = {"sweep.only": chosen} if only else {}
    sweep = fedsim.sweep(path_of_sweep, out=RUNS / study.name, set=changes)
    row_of_failure = getattr(study.module, "row_of_failure", None)
    if sweep.failures and not row_of_failure:
        raise ConfigError(f"studies/{study.name}: {len(sweep.failures)} cells failed, the first: {sweep.failures[0]}")
    rows_of_sweep = getattr(study.module, "rows_of_sweep", None)
    rows = list(rows_of_sweep(sweep) if rows_of_sweep else kept_rows(study.file, sweep))
    if row_of_failure:
        has_failed = sweep.cells["state"] == "failed"
        failed = sweep.cells[has_failed].astype(str).to_dict("records")
        rows += [row_of_failure(cell, fedsim.open(sweep.path / cell["run"], trust=True)) for cell in failed]
    path.unlink(missing_ok=True)
    append_rows(path, rows, study.file.number_format)


def kept_rows(file: StudyFile, sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each score of the metrics that a study keeps, in its own columns."""
    for labels, run in runs_of_sweep(sweep):
        about = {**labels, "accuracy": final_accuracy(run)}
        for score in run.scores.to_dict("records"):
            if score["metric"] in file.metrics:
                known = about | score
                yield {
                    name: file.values.get(str(known[column]), known[column]) for name, column in file.columns.items()
                }


def runs_of_sweep(sweep: fedsim.Sweep) -> Iterator[tuple[dict[str, str], fedsim.Run]]:
    """Yield the labels of each cell of the grid that was made, and its run; controls that were added are none."""
    is_kept = (sweep.cells["state"] == "done") & (sweep.cells["added"] == 0)
    for cell in sweep.cells[is_kept].astype(str).to_dict("records"):
        yield cell, fedsim.open(sweep.path / cell["run"], trust=True)


def run_or_resume(experiment: Mapping[str, Any], folder: Path) -> fedsim.Run:
    """Return the run of an experiment in `folder`; make it where there is none, finish it where it was interrupted.

    Raises:
        ConfigError: the run in `folder` is of another experiment.
    """
    if not (path := folder / "experiment.toml").exists():
        return fedsim.run(experiment, out=folder)
    asked = resolve(config_of(copy_tables(experiment), folder.name, Path.cwd()))
    for key, (before, now) in changed_settings(flat_settings(load_config(path)), flat_settings(asked)).items():
        if key.removeprefix("federation.") not in LAUNCH:
            raise ConfigError(
                f"{folder}: {key}: the run was made with {before}, and the study asks for {now}; remove it"
            )
    return fedsim.open(folder).resume()


def final_accuracy(run: fedsim.Run) -> float:
    """Return the accuracy of the global model at its last evaluation; NaN where there was none."""
    rows = run.metrics
    values = rows[rows["client"] == "server"]["accuracy"].dropna()
    return float(values.iloc[-1]) if len(values) else float("nan")
