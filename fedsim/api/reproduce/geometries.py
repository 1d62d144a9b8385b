"""Tables about the geometry of updates: no attack is made, so no sweep scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

from fedsim.api.cell_runner import measure_resources, run_anew
from fedsim.api.reproduce.recipes import ScaleName, SweepRecipe, Who, defined_values, format_figure
from fedsim.base.progress import track
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import config_of, set_value
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.report.geometry import geometries_of_updates
from fedsim.sweeps.cells import federation_key
from fedsim.sweeps.store import StoreEntry


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
