"""Sweep of a Flower app: attacks x defenses x settings x seeds, by a sweep file as of experiments.

Cells that differ in their attack alone share a run folder. It is kept: the same sweep goes on with what is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.api.app_runs import AppRequest, attack_request, parse_request, record_request
from fedsim.api.logs import log_to_file
from fedsim.api.pipeline import AuditResult
from fedsim.api.sweeping import check_sweep_folder
from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import ConfigError, FedsimError
from fedsim.base.files import write_text
from fedsim.base.grouping import group_by
from fedsim.base.progress import report_progress
from fedsim.federation import lock
from fedsim.federation.app_file import RUN_TABLES
from fedsim.federation.app_run import build_app_defenses
from fedsim.federation.defense_limits import describe_defense_limits, find_open_rounds
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.flower_app import FlowerApp
from fedsim.federation.open_run import OpenRun
from fedsim.report.sweep_page import FILE, PAGE, write_sweep_page
from fedsim.sweeps.controls import without_defense
from fedsim.sweeps.file import SweepFile
from fedsim.sweeps.grid import ATTACK, DEFENSE, GridPoint, SweepGrid, build_grid
from fedsim.sweeps.rows import sweep_rows
from fedsim.sweeps.table import write_cells, write_table

log = logging.getLogger(__name__)
_RUNS = "runs"
_KEY_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class AppCell:
    """One attack on one run of an app.

    Attributes:
        request: the run of the app, and its attack.
        run: hash of everything but the attack, by which cells share a run folder.
        control: key of the cell with the same settings and no defense; its own where it has none.
    """

    point: GridPoint
    request: AppRequest
    run: str
    key: str
    control: str


def build_app_cells(file: SweepFile, app: FlowerApp, *, trust: bool = False) -> list[AppCell]:
    """Build the cells of a sweep file, and the controls without a defense that it lacks."""
    for key in ("workers", "address", "stop_without_leak"):
        if getattr(file.sweep, key):
            raise ConfigError(f"{file.where}: sweep.{key}: cells of an app run one after the other; leave it out")
    if file.sweep.on != "processes":
        raise ConfigError(f"{file.where}: sweep.on: cells of an app run on this machine; leave it out")
    grid = build_grid(file)
    cells = [_build_cell(grid, point, app, trust) for point in grid.points]
    by_key: dict[str, AppCell] = {}
    for cell in cells:
        if (first := by_key.setdefault(cell.key, cell)) is not cell:
            raise ConfigError(
                f"{file.where}: these two cells have the same settings: {first.point.name}; and {cell.point.name}; "
                "leave a value out"
            )
    for cell in cells:
        if cell.control not in by_key:
            by_key[cell.control] = _build_cell(grid, without_defense(grid, cell.point), app, trust)
    return list(by_key.values())


def _build_cell(grid: SweepGrid, point: GridPoint, app: FlowerApp, trust: bool) -> AppCell:
    file = grid.file
    path = None if file.is_own else Path(file.where)
    request = parse_request(app, grid.tables(point), file.where, file.folder, trust=trust, path=path)
    undefended = replace(request, file=request.file.model_copy(update={DEFENSE: []}))
    inputs = {
        "run": request.describe(is_complete=True),
        "attack": request.file.model_dump(mode="json", exclude_none=True, exclude=set(RUN_TABLES)),
    }
    of_run = {**inputs, "attack": {**inputs["attack"], ATTACK: []}}
    of_control = {**inputs, "run": undefended.describe(is_complete=True)}
    run, key, control = (hash_json(of)[:_KEY_LENGTH] for of in (of_run, inputs, of_control))
    return AppCell(point=point, request=request, run=run, key=key, control=control)


def run_app_sweep(file: SweepFile, app: FlowerApp, folder: Path, *, trust: bool) -> list[str]:
    """Run all cells that are not done, one after the other; write tables and page, and return what failed.

    Args:
        folder: of its tables, which also holds the runs.
    """
    check_sweep_folder(folder)
    cells = build_app_cells(file, app, trust=trust)
    controls_first = sorted(cells, key=lambda cell: bool(cell.request.file.defense))
    groups = group_by(controls_first, lambda cell: cell.run)
    results: dict[str, _CellResult] = {}
    with lock.lock_folder(folder), log_to_file(folder / "log.txt"):
        (folder / PAGE).unlink(missing_ok=True)
        write_text(folder / FILE, tomli_w.dumps(file.tables))
        log.info("%d cells on %d runs of the app", len(cells), len(groups))
        for number, group in enumerate(groups.values()):
            report_progress("runs", number, len(groups))
            results |= _run_group(group, OpenRun(folder / _run_path(group[0])), trust)
            _write_tables(folder, cells, results)
        report_progress("runs", len(groups), len(groups))
        write_sweep_page(folder)
    return [f"{cell.point.name}: {results[cell.key].reason}" for cell in cells if results[cell.key].reason]


@dataclass(frozen=True)
class _CellResult:
    """Rows of a cell's scores, why it failed, if it did, and which rounds its defenses leave as they are."""

    rows: Sequence[Mapping[str, str]]
    seconds: float
    reason: str = ""
    defense_limits: str = ""
    open_rounds: str = ""


def _run_group(group: Sequence[AppCell], folder: OpenRun, trust: bool) -> dict[str, _CellResult]:
    """Run the app of cells that differ in their attack alone, and attack it by all of them."""
    request, start = group[0].request, time.monotonic()
    titles = _name_attacks(group)
    attacks = []
    for cell in group:
        attack, title = cell.request.file.attack[-1], titles[cell.key]
        attacks.append(attack if attack.title == title else attack.model_copy(update={"label": title}))
    request = replace(request, file=request.file.model_copy(update={ATTACK: attacks}))
    try:
        if not _is_recorded(request, folder):
            record_request(request, folder, overwrite=folder.path.is_dir())
        done = attack_request(request, folder, trust=trust)
        rows = {cell.key: sweep_rows(folder, titles[cell.key], done.planned_jobs, done.variants) for cell in group}
    except FedsimError as error:
        return {cell.key: _CellResult((), time.monotonic() - start, str(error)) for cell in group}
    seconds = (time.monotonic() - start) / len(group)
    defenses, rounds = build_app_defenses(request.file), folder.recording.rounds
    limits = " ".join(describe_defense_limits(defenses, rounds))
    open_rounds = " ".join(map(str, find_open_rounds(defenses, rounds)))
    return {
        key: _CellResult(rows[key], seconds, _find_failures(title, titles, done), limits, open_rounds)
        for key, title in titles.items()
    }


def _name_attacks(group: Sequence[AppCell]) -> dict[str, str]:
    """Return by the key of each cell a title of its attack, which no other attack of the group has."""
    choices = (
        [cell.request.file.attack[-1].title for cell in group],
        [cell.point.labels[ATTACK] for cell in group],
        [cell.key for cell in group],
    )
    titles = next(titles for titles in choices if len(set(titles)) == len(group))
    return {cell.key: title for cell, title in zip(group, titles, strict=True)}


def _find_failures(title: str, titles: Mapping[str, str], done: AuditResult) -> str:
    """Return what failed of a cell: sentences that name its attack, or none of those beside it."""
    longest_first = sorted(titles.values(), key=len, reverse=True)  # one title may begin another
    named = [(text, next(filter(text.startswith, longest_first), title)) for text in done.failures]
    return "; ".join(text for text, attack in named if attack == title)


def _is_recorded(request: AppRequest, folder: OpenRun) -> bool:
    """Return whether the folder holds this very run of the app, to its end."""
    return folder.app.is_file() and read_toml(folder.app) == request.describe(is_complete=True)


def _write_tables(folder: Path, cells: Sequence[AppCell], results: Mapping[str, _CellResult]) -> None:
    axes = tuple(axis for axis in cells[0].point.labels if axis != ATTACK)
    write_table(folder, axes, _score_rows(cells, results))
    write_cells(folder, axes, _cell_rows(cells, results))


def _score_rows(cells: Sequence[AppCell], results: Mapping[str, _CellResult]) -> Iterator[dict[str, Any]]:
    for cell in cells:
        if cell.key in results:
            for row in results[cell.key].rows:
                yield {**_cell_columns(cell), "baseline": 0, **row, "run": _run_path(cell)}


def _cell_rows(cells: Sequence[AppCell], results: Mapping[str, _CellResult]) -> Iterator[dict[str, Any]]:
    for cell in cells:
        row = {**_cell_columns(cell), "added": int(cell.point.is_added), "run": ""}
        row |= {"no_control": "", "defense_limits": "", "open_rounds": ""}
        if cell.key not in results:
            yield row | {"state": "not done", "reason": ""}
            continue
        result = results[cell.key]
        state = "failed" if result.reason else "done"
        row |= {"defense_limits": result.defense_limits, "open_rounds": result.open_rounds}
        row |= {"state": state, "reason": result.reason}
        yield row | {"seconds": round(result.seconds, 2), "run": _run_path(cell)}


def _cell_columns(cell: AppCell) -> dict[str, Any]:
    return {"cell": cell.key, "federation": cell.run, "control": cell.control, **cell.point.row}


def _run_path(cell: AppCell) -> str:
    """Return the run folder of a cell, from the folder of the sweep."""
    return str(Path(_RUNS, cell.run))
