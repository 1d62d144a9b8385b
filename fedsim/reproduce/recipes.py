"""How a table is made again: a sweep file with a [reproduce] table, which says what in `sweep.csv` is which figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedsim.errors import ConfigError, did_you_mean
from fedsim.evaluation.statistics import mean_and_margin
from fedsim.experiments.config import Table, check
from fedsim.reproduce.figures import REFUSED
from fedsim.reproduce.papers import HERE, papers, read_toml
from fedsim.sweeps.file import SweepFile, sweep_of
from fedsim.sweeps.table import Table as Scores

ScaleName = Literal["quick", "full"]
Spread = Literal["standard error", "standard deviation", "95 % interval"]
Who = tuple[str, ...]
"""Seed, victim, round and repeat."""
_WHO = ("seed", "victim", "round", "repeat")


class Reading(Table):
    """Where a figure stands in `sweep.csv`.

    Attributes:
        attack: the label of an attack.
        metric: a metric; or `floor`, `accuracy` or `seconds`, which are columns.
        of: the metric whose floor it is.
        minus: the label of an attack that is subtracted, victim by victim.
        over: the label of an attack by whose mean this mean is divided.
        adaptive: whether the adversary knows the clients' defenses.
        times: what each value is multiplied by, such as 100 for a share in %.
    """

    attack: str
    metric: str
    of: str | None = None
    minus: str | None = None
    over: str | None = None
    adaptive: bool = False
    times: float = 1.0


class Scale(Table):
    """How much of a table is run.

    Attributes:
        minutes: how long it takes, once measured.
        on: on what.
        note: what it leaves out.
        tables: what differs in the sweep file, such as `{"federation": {"clients": 3}}`; lists are replaced.
    """

    minutes: float = Field(gt=0)
    on: str = "one core"
    note: str
    tables: dict[str, Any] = Field(default_factory=dict)


class Recipe(Table):
    """[reproduce] in a sweep file.

    Attributes:
        rows: by row of the paper's table, the label of each axis; of a geometry, what is set.
        quantities: by quantity of the paper's table.
        geometry: the same where updates are looked at and not attacked (`fedsim geometry`), by quantity what is read.
        train: the tables of an experiment with [states], which is trained first; its states are files beside the sweep.
        spread: what stands behind ±, over victims and seeds.
        quick: minutes on two cores.
        full: as in the paper, as far as data at hand allow.
    """

    rows: dict[str, dict[str, str | int | float]]
    quantities: dict[str, Reading] = Field(default_factory=dict)
    geometry: dict[str, Literal["min ratio", "cosine at w_0", "max cosine"]] = Field(default_factory=dict)
    train: dict[str, Any] | None = None
    spread: Spread = "standard error"
    quick: Scale
    full: Scale


@dataclass(frozen=True)
class Made:
    """A recipe, and the sweep that it needs.

    Attributes:
        recipe: what to read where.
        tables: those of the sweep file, without [reproduce].
        where: the name of the file.
    """

    recipe: Recipe
    tables: Mapping[str, Any]
    where: str

    def scale(self, name: ScaleName) -> Scale:
        """One of the two scales."""
        return self.recipe.quick if name == "quick" else self.recipe.full

    def at(self, name: ScaleName) -> dict[str, Any]:
        """The tables at a scale."""
        return dict(_merged(self.tables, self.scale(name).tables))

    def sweep(self, name: ScaleName, folder: Path) -> SweepFile:
        """The sweep at a scale; paths in it are relative to `folder`."""
        return sweep_of(self.at(name), self.where, folder)


@cache
def recipe_of(paper: str, table: str) -> Made | None:
    """How a table is made again; None where no sweep file says it.

    Raises:
        ConfigError: a row or a quantity that the paper's table does not have.
    """
    path = HERE / "sweeps" / f"{paper}-{table}.toml"
    if not path.exists():
        return None
    tables = read_toml(path)
    recipe = check(Recipe, tables.pop("reproduce", {}), f"{path.name}: reproduce")
    published = papers()[paper].table[table]
    for kind, named, known in (
        ("row", recipe.rows, published.rows),
        ("quantity", {**recipe.quantities, **recipe.geometry}, published.quantities),
    ):
        for strange in named.keys() - known.keys():
            raise ConfigError(f"{path.name}: no {kind} is called '{strange}', {did_you_mean(strange, known)}")
    return Made(recipe, tables, path.name)


def made_by(paper: str, table: str) -> str:
    """What makes a table again, a sweep at two scales or a script of the repository, and how long that takes."""
    if made := recipe_of(paper, table):
        return f"quick, {long(made.recipe.quick.minutes)}; full, {long(made.recipe.full.minutes)}"
    script = papers()[paper].table[table].script
    assert script is not None
    return f"{Path(script.command).name}, {long(script.minutes) if script.minutes else 'time not written down'}"


def long(minutes: float) -> str:
    """Minutes or hours."""
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def read(recipe: Recipe, scores: Scores, decimals: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """The figures of a sweep, by row and quantity; what was not run is left out.

    Args:
        recipe: where they stand.
        scores: what the sweep scored.
        decimals: by quantity, how many digits behind the point.
    """
    found = {}
    for row, labels in recipe.rows.items():
        of_row = [line for line in scores.rows if all(line[axis] == str(label) for axis, label in labels.items())]
        texts = {name: _figure(reading, of_row, recipe, decimals[name]) for name, reading in recipe.quantities.items()}
        if any(texts.values()):
            found[row] = {name: text for name, text in texts.items() if text}
    return found


def _figure(reading: Reading, lines: Sequence[Mapping[str, str]], recipe: Recipe, decimals: int) -> str:
    """Mean and spread over victims and seeds, and over how many if some have none; nothing where it was not run."""
    other = reading.minus or reading.over
    found, others = (_values(reading, attack, lines) for attack in (reading.attack, other or reading.attack))
    if found is None or others is None:
        return ""
    if reading.minus is not None:
        found = {who: value - others.get(who, math.nan) for who, value in found.items()}
    there, others = known(found), known(others)
    if not there or (reading.over is not None and not others):
        return REFUSED
    if reading.over is not None:
        return f"{np.mean(list(there.values())) / np.mean(list(others.values())):.{decimals}f}"
    text = printed(there, decimals, recipe.spread, sign="+" if reading.minus is not None else "")
    return text if len(there) == len(found) else f"{text} ({len(there)} of {len(found)})"


def known(found: Mapping[Who, float]) -> dict[Who, float]:
    """The values that are not NaN."""
    return {who: value for who, value in found.items() if not math.isnan(value)}


def printed(found: Mapping[Who, float], decimals: int, spread: Spread, *, sign: str = "") -> str:
    """Mean and spread of `known` values, as a figure; without a spread where one is infinite."""
    values = np.array(list(found.values()))
    text = f"{values.mean():{sign}.{decimals}f}"
    return text if len(values) < 2 or np.isinf(values).any() else f"{text} ± {_spread(found, spread):.{decimals}f}"


def _values(reading: Reading, attack: str, lines: Sequence[Mapping[str, str]]) -> dict[Who, float] | None:
    """By victim and seed, NaN where the attack failed or has no value; None where no cell of this attack was run."""
    metric = reading.of or reading.metric
    column = "floor" if reading.of else reading.metric if reading.metric in ("accuracy", "seconds") else "value"
    rows = [
        line
        for line in lines
        if line["attack"] == attack
        and line["knows_defenses"] == str(int(reading.adaptive))
        and (column in ("accuracy", "seconds") or line["metric"] in (metric, ""))
    ]
    if not rows:
        return None
    return {tuple(row[name] for name in _WHO): reading.times * float(row[column] or "nan") for row in rows}


def _spread(found: Mapping[Who, float], what: Spread) -> float:
    if what == "95 % interval":
        by: dict[tuple[str, str], list[float]] = {}
        for (seed, victim, _, _), value in found.items():
            by.setdefault((victim, seed), []).append(value)
        return mean_and_margin({who: float(np.mean(some)) for who, some in by.items()})[1]
    values = np.array(list(found.values()))
    return float(values.std(ddof=1)) / (math.sqrt(len(values)) if what == "standard error" else 1.0)


def _merged(some: Any, more: Any) -> Any:
    """A copy of `some` in which `more` says what differs."""
    if isinstance(some, Mapping) and isinstance(more, Mapping):
        return {key: _merged(some.get(key), more.get(key, some.get(key))) for key in {**some, **more}}
    return deepcopy(more)
