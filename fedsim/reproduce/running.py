"""Runs a table of a paper again and puts what it got beside what the paper prints."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedsim.errors import ConfigError, some_of
from fedsim.experiments.reading import config_of
from fedsim.experiments.training_states import make_states
from fedsim.files import write_text
from fedsim.reproduce.figures import Figure
from fedsim.reproduce.geometries import geometries
from fedsim.reproduce.papers import HERE, Compared, Kept, compared, papers, results
from fedsim.reproduce.recipes import Made, ScaleName, read, recipe_of
from fedsim.sweeps.store import Store
from fedsim.sweeps.table import read_table
from fedsim.workflow.sweeping import STORE, swept

RESULT = "result.toml"
"""In the folder of a reproduction: what it got, as the files in `kept/` have it."""
_TOLD = 3
"""Most reasons for failures that a result quotes."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a table got.

    Attributes:
        kept: ours, as the files in `kept/` have it.
        beside: ours beside the paper's.
        failures: a sentence for each cell that failed.
        left_out: a sentence for each cell that does not apply.
        folder: of the sweep.
    """

    kept: Kept
    beside: Sequence[Compared]
    failures: Sequence[str]
    left_out: Sequence[str]
    folder: Path


def recipe(paper: str, table: str) -> Made:
    """How a table is made again.

    Raises:
        ConfigError: no sweep makes it; the sentence has the commands that do.
    """
    made = recipe_of(paper, table)
    if made is None:
        commands = dict.fromkeys(kept.command.strip() for kept in results()[paper].kept if kept.table == table)
        script = papers()[paper].table[table].script
        assert script is not None
        told = ":\n" + "\n".join(commands) if commands else ", but its result is not kept yet"
        raise ConfigError(
            f"reproduce: {paper}/{table}: no sweep makes this table; in the repository `{script.command}` does{told}"
        )
    return made


def reproduced(paper: str, table: str, scale: ScaleName, store: Path | None = None) -> Outcome:
    """Run the sweep of a table, as far as it is not done, and compare.

    Args:
        paper: a paper's name.
        table: the name of one of its tables.
        scale: `quick` or `full`.
        store: of the cells that sweeps share; `runs/cells` by default.

    Raises:
        FedsimError: the sweep cannot be run.
    """
    made, folder = recipe(paper, table), Path("runs") / "reproduce" / f"{paper}-{table}-{scale}"
    decimals, beside = _decimals(paper, table), _states(made, paper)
    if made.recipe.geometry:
        rows = geometries(made, scale, folder, beside, decimals)
        failures, reasons, left_out = list[str](), list[str](), list[str]()
    else:
        board = swept(made.sweep(scale, beside), folder, Store(store or STORE))
        rows = read(made.recipe, read_table(folder), decimals)
        failures, reasons = board.failures, list(board.reasons)
        left_out = [f"{point.name}: {reason}" for point, reason in board.plan.left_out]
    kept = Kept(
        table=table,
        name=scale,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        command=f"fedsim reproduce {paper}/{table} --scale {scale} --data-dir DIR",
        note=f"{made.scale(scale).note} ± is the {made.recipe.spread} over victims and seeds."
        f"{_lacks(reasons, left_out)}",
        rows=rows,
    )
    write_text(folder / RESULT, tomli_w.dumps({"paper": paper, "kept": [kept.model_dump()]}))
    return Outcome(kept, compared(paper, table, rows, made.where), failures, left_out, folder)


def _lacks(reasons: Sequence[str], left_out: Sequence[str]) -> str:
    """What is not in the figures, and why, after a space; nothing where all is."""
    text = f" Failed: {some_of(reasons, _TOLD, '; ')}." if reasons else ""
    count = len(left_out)
    return text + (f" {count} cell{'s do' if count > 1 else ' does'} not apply." if count else "")


def _states(made: Made, name: str) -> Path:
    """The folder of the trained states that a recipe starts from, where it asks for some; tables share them."""
    if made.recipe.train is None:
        return HERE
    config = config_of(deepcopy(made.recipe.train), f"{made.where}: reproduce.train", HERE)
    return make_states(config, name, None).folder


def _decimals(paper: str, table: str) -> dict[str, int]:
    """By quantity, how many digits behind the point."""
    asked = papers()[paper].table[table]
    published = asked.published(f"{paper}.toml: {table}").values()
    return {name: _digits([row[name] for row in published if name in row]) for name in asked.quantities}


def _digits(figures: Sequence[Figure]) -> int:
    """As many as the paper prints at most; but two where it prints none, or a share as .7."""
    least = 2 if all(abs(one.value or 0.0) < 1 for one in figures) else 0
    return max([least, *(one.decimals for one in figures)])
