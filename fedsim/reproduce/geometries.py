"""Tables about the geometry of updates: no attack is made, so no sweep scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

from fedsim.experiments import lock
from fedsim.experiments.build import Experiment, resolve
from fedsim.experiments.config import Config
from fedsim.experiments.reading import config_of, put
from fedsim.experiments.run_folder import RunFolder
from fedsim.progress import tracked
from fedsim.recording.transcript import Transcript
from fedsim.reporting.geometry import recorded
from fedsim.reproduce.recipes import Made, ScaleName, Who, known, printed
from fedsim.sweeps.cells import federation_key
from fedsim.sweeps.store import Place
from fedsim.workflow.cell_work import begun, measured


def geometries(
    made: Made, scale: ScaleName, folder: Path, beside: Path, decimals: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """The figures of a table, by row and quantity; rows that are done are not made again.

    Args:
        made: the recipe.
        scale: `quick` or `full`.
        folder: for a run of each row.
        beside: to which paths in the recipe are relative.
        decimals: by quantity, how many digits behind the point.

    Raises:
        FedsimError: a run failed.
    """
    found = {}
    for row in tracked(made.recipe.rows, "rows", len(made.recipe.rows)):
        values = _measured(_config(made, scale, row, beside), folder)
        found[row] = {
            name: printed(known(_by_client(values, what)), decimals[name], made.recipe.spread)
            for name, what in made.recipe.geometry.items()
        }
    return found


def _by_client(rows: Sequence[Mapping[str, str]], what: str) -> dict[Who, float]:
    return {("", str(place), "", ""): float(row[what]) for place, row in enumerate(rows)}


def _config(made: Made, scale: ScaleName, row: str, beside: Path) -> Config:
    """The experiment of a row."""
    tables = deepcopy(made.at(scale))
    for key, value in made.recipe.rows[row].items():
        put(tables, key, value, made.where)
    return resolve(config_of(tables, made.where, beside))


def _measured(config: Config, folder: Path) -> Sequence[Mapping[str, str]]:
    """What `fedsim geometry` says of each client of a run, which is kept, named and checked as a cell of a sweep is."""
    place = Place(RunFolder(folder / federation_key(config)))
    with lock.held(place.folder.path, wait=True):
        if (kept := place.finished()) is not None:
            return kept.rows
        with measured() as used:
            done = begun(place, config)
            every = [item.summary for _, _, item in recorded(Experiment(config), Transcript(place.folder.path), [1])]
        place.folder.write_table(place.folder.geometry, list(every[0]), every)
        rows = [{name: str(value) for name, value in summary.items()} for summary in every]
        place.finish(rows=rows, failures=done.failures, crashed=False, **used)
    return rows
