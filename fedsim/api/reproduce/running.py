"""Runs a table of a paper again and compares the figures with those that the paper prints."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from fedsim.api.cell_runner import measure_resources, run_anew
from fedsim.api.reproduce.figures import Figure
from fedsim.api.reproduce.papers import (
    PACKAGE_FOLDER,
    FigureComparison,
    KeptResult,
    compare_figures,
    format_kept,
    read_papers,
    read_results,
)
from fedsim.api.reproduce.recipes import (
    ScaleName,
    SweepRecipe,
    Who,
    defined_values,
    find_recipe,
    format_figure,
    read_reasons,
    read_sweep_figures,
)
from fedsim.api.sweeping import STORE, run_sweep
from fedsim.base.errors import ConfigError, join_first
from fedsim.base.files import write_text
from fedsim.base.progress import track
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import config_of, set_value
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.training_states import make_states
from fedsim.report.geometry import geometries_of_updates
from fedsim.sweeps.cells import federation_key
from fedsim.sweeps.store import CellStore, StoreEntry
from fedsim.sweeps.table import read_cells, read_table

RESULT = "result.toml"
"""File in the folder of a reproduction with its results, in the format of the files in `kept/`."""
_MAX_REASONS = 3
"""Most reasons for failures that a result quotes."""


@dataclass(frozen=True)
class ReproductionOutcome:
    """Outcome of a run of a table.

    Attributes:
        kept: our figures, in the format of the files in `kept/`.
        comparisons: our figures compared with the paper's.
        failures: a sentence for each cell that failed.
        left_out: a sentence for each cell that does not apply.
    """

    kept: KeptResult
    comparisons: Sequence[FigureComparison]
    failures: Sequence[str]
    left_out: Sequence[str]
    folder: Path


def require_recipe(paper: str, table: str) -> SweepRecipe:
    """Return the recipe of a table."""
    sweep_recipe = find_recipe(paper, table)
    if sweep_recipe is None:
        commands = dict.fromkeys(kept.command.strip() for kept in read_results()[paper].kept if kept.table == table)
        script = read_papers()[paper].table[table].script
        assert script is not None
        known_commands = ":\n" + "\n".join(commands) if commands else ", but its result is not kept yet"
        raise ConfigError(
            f"reproduce: {paper}/{table}: no sweep makes this table; in the repository `{script.command}` does"
            f"{known_commands}"
        )
    return sweep_recipe


def reproduce_table(paper: str, table: str, scale: ScaleName, store: Path | None = None) -> ReproductionOutcome:
    """Run the sweep of a table, as far as it is not done, and compare.

    Args:
        store: of the cells that sweeps share; `runs/cells` by default.
    """
    # Run the sweep, or the federations of a geometry, and read the figures.
    sweep_recipe, folder = require_recipe(paper, table), Path("runs") / "reproduce" / f"{paper}-{table}-{scale}"
    decimals, base_folder = _decimals(paper, table), _trained_states(sweep_recipe, paper)
    reasons_by_row = dict[str, str]()
    if sweep_recipe.recipe.geometry:
        rows = geometry_figures(sweep_recipe, scale, folder, base_folder, decimals)
        failures, reasons, left_out = list[str](), list[str](), list[str]()
    else:
        board = run_sweep(sweep_recipe.sweep(scale, base_folder), folder, CellStore(store or STORE))
        recipe = sweep_recipe.recipe.with_attack_rows(read_cells(folder))
        rows = read_sweep_figures(recipe, read_table(folder), decimals)
        reasons_by_row = read_reasons(recipe, board, rows)
        if recipe.by_attack:
            # That an attack does not apply or finds nothing is a result of such a table, and a row of it.
            failures, reasons, left_out = board.crash_summaries, [], []
        else:
            failures, reasons = board.failure_summaries, list(board.cells_by_reason)
            left_out = [f"{point.name}: {reason}" for point, reason in board.plan.inapplicable]
    # Keep them beside the paper's.
    kept = KeptResult(
        table=table,
        name=scale,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        command=f"fedsim reproduce {paper}/{table} --scale {scale} --data-dir DIR",
        note=f"{sweep_recipe.scale(scale).note} ± is the {sweep_recipe.recipe.spread} over victims and seeds."
        f"{_sentence_on_missing(reasons, left_out)}",
        rows=rows,
        reasons=reasons_by_row,
    )
    write_text(folder / RESULT, format_kept({"paper": paper, "kept": [kept.model_dump()]}))
    return ReproductionOutcome(
        kept, compare_figures(paper, table, rows, sweep_recipe.where), failures, left_out, folder
    )


def _sentence_on_missing(reasons: Sequence[str], left_out: Sequence[str]) -> str:
    """Say what is not in the figures, and why, after a space; empty where all is."""
    text = f" Failed: {join_first(reasons, _MAX_REASONS, '; ')}." if reasons else ""
    if left_out:
        text += " 1 cell does not apply." if len(left_out) == 1 else f" {len(left_out)} cells do not apply."
    return text


def _trained_states(made: SweepRecipe, name: str) -> Path:
    """Return the folder of the trained states that a recipe starts from, if it asks for some; tables share them."""
    if made.recipe.train is None:
        return PACKAGE_FOLDER
    config = config_of(deepcopy(made.recipe.train), f"{made.where}: reproduce.train", PACKAGE_FOLDER)
    return make_states(config, name, None).folder


def _decimals(paper: str, table: str) -> dict[str, int]:
    """Return by quantity how many digits are behind the point."""
    published_table = read_papers()[paper].table[table]
    published = published_table.published_figures(f"{paper}.toml: {table}").values()
    decimals = {}
    for name in published_table.quantities:
        decimals[name] = _max_decimals([row[name] for row in published if name in row])
    return decimals


def _max_decimals(figures: Sequence[Figure]) -> int:
    """Return as many as the paper prints at most; but at least two where it prints none, or shares as .7."""
    lowest = 2 if all(abs(figure.value or 0.0) < 1 for figure in figures) else 0
    return max([lowest, *(figure.decimals for figure in figures)])


def geometry_figures(
    made: SweepRecipe, scale: ScaleName, folder: Path, beside: Path, decimals: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """Return the figures of a table, by row and quantity; rows that are done are not made again.

    Args:
        beside: to which paths in the recipe are relative.
    """
    figures: dict[str, dict[str, str]] = {}
    for row in track(made.recipe.rows, "rows", len(made.recipe.rows)):
        client_rows = _measure_geometry(_config(made, scale, row, beside), folder)
        figures[row] = {}
        for quantity, column in made.recipe.geometry.items():
            values = defined_values(_values_by_client(client_rows, column))
            figures[row][quantity] = format_figure(values, decimals[quantity], made.recipe.spread)
    return figures


def _values_by_client(rows: Sequence[Mapping[str, str]], column: str) -> dict[Who, float]:
    return {("", str(number), "", ""): float(row[column]) for number, row in enumerate(rows)}


def _config(made: SweepRecipe, scale: ScaleName, row: str, beside: Path) -> Config:
    """Return the experiment of a row."""
    tables = deepcopy(made.tables_at(scale))
    for key, value in made.recipe.rows[row].items():
        set_value(tables, key, value, made.where)
    return resolve(config_of(tables, made.where, beside))


def _measure_geometry(config: Config, folder: Path) -> Sequence[Mapping[str, str]]:
    """Run a federation and return the geometry of each client's update, as `fedsim geometry` computes it.

    The run is kept, named and checked like a cell of a sweep; one that is there already is not made again.
    """
    cell_place = StoreEntry(OpenRun(folder / federation_key(config)))
    with lock.lock_folder(cell_place.folder.path, cell_place.folder, wait=True):
        if (marker := cell_place.read_intact()) is not None:
            return marker.rows
        with measure_resources() as resources:
            done = run_anew(cell_place, config)
            updates = geometries_of_updates(Experiment(config), cell_place.folder.recording, [1])
            summaries = [geometry.summary for _, _, geometry in updates]
        cell_place.folder.write_table(cell_place.folder.geometry, list(summaries[0]), summaries)
        rows = [{name: str(value) for name, value in summary.items()} for summary in summaries]
        cell_place.write_marker(rows=rows, failures=done.failures, crashed=False, **resources)
    return rows
