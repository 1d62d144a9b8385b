"""Recipes for tables of papers: a sweep file with a [reproduce] table, which maps `sweep.csv` to figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedsim.api.reproduce.figures import REFUSED
from fedsim.api.reproduce.papers import PACKAGE_FOLDER, read_papers, read_toml
from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.base.errors import ConfigError, did_you_mean, join_first
from fedsim.federation.table import Table
from fedsim.federation.table_validation import validate_tables
from fedsim.sweeps.board import SweepBoard
from fedsim.sweeps.file import SweepFile, parse_sweep
from fedsim.sweeps.table import SweepTableFile as Scores

ScaleName = Literal["quick", "full"]
Spread = Literal["standard error", "standard deviation", "95 % interval"]
Who = tuple[str, ...]
"""Seed, victim, round and repeat."""
_WHO_COLUMNS = ("seed", "victim", "round", "repeat")
_VICTIM = re.compile(r"^.+?, (rounds? \S+, )?client \d+: (round \d+, client \d+: )?")
"""Beginning of a failure, which says for which victim an attack failed."""


class FigureSource(Table):
    """Place of a figure in `sweep.csv`.

    Attributes:
        attack: the label of an attack; empty where attacks have rows of their own.
        metric: a metric; or `floor`, `accuracy` or `seconds`, which are columns.
        of: the metric whose floor it is.
        beyond_floor: whether the floor is subtracted, victim by victim.
        minus: the label of an attack that is subtracted, victim by victim.
        over: the label of an attack by whose mean this mean is divided.
        adaptive: whether the adversary knows the clients' defenses.
        times: what each value is multiplied by, such as 100 for a share in %.
    """

    attack: str = ""
    metric: str
    of: str | None = None
    beyond_floor: bool = False
    minus: str | None = None
    over: str | None = None
    adaptive: bool = False
    times: float = 1.0


class Scale(Table):
    """Scale at which a table is run.

    Attributes:
        note: what it leaves out.
        tables: what differs in the sweep file, such as `{"federation": {"clients": 3}}`; lists are replaced.
    """

    minutes: float = Field(gt=0)
    on: str = "one core"
    note: str
    tables: dict[str, Any] = Field(default_factory=dict)


class TableRecipe(Table):
    """Table [reproduce] in a sweep file.

    Attributes:
        rows: by row of the paper's table, the label of each axis; of a geometry, what is set.
        by_attack: whether each attack of the sweep has a row of its own for each of `rows`.
        quantities: by quantity of the paper's table.
        geometry: the same where updates are looked at and not attacked (`fedsim geometry`), by quantity what is read.
        train: the tables of an experiment with [states], which is trained first; its states are files beside the sweep.
        spread: what stands behind ±, over victims and seeds.
        quick: minutes on two cores.
        full: as in the paper, as far as data at hand allow.
    """

    rows: dict[str, dict[str, str | int | float]]
    by_attack: bool = False
    quantities: dict[str, FigureSource] = Field(default_factory=dict)
    geometry: dict[str, Literal["min ratio", "cosine at w_0", "max cosine"]] = Field(default_factory=dict)
    train: dict[str, Any] | None = None
    spread: Spread = "standard error"
    quick: Scale
    full: Scale

    def with_attack_rows(self, cells: Scores) -> TableRecipe:
        """Return the recipe with a row for each row and attack, where attacks have rows of their own.

        Args:
            cells: `cells.csv` of the sweep, which has the attacks that do not apply as well.
        """
        if not self.by_attack:
            return self
        attacks = dict.fromkeys(line["attack"] for line in cells.rows)
        rows = {
            f"{row}: {attack}": {**labels, "attack": attack} for row, labels in self.rows.items() for attack in attacks
        }
        return self.model_copy(update={"rows": rows})


@dataclass(frozen=True)
class SweepRecipe:
    """Recipe with the sweep that it needs.

    Attributes:
        tables: those of the sweep file, without [reproduce].
    """

    recipe: TableRecipe
    tables: Mapping[str, Any]
    where: str

    def scale(self, name: ScaleName) -> Scale:
        """Return one of the two scales."""
        return self.recipe.quick if name == "quick" else self.recipe.full

    def tables_at(self, name: ScaleName) -> dict[str, Any]:
        """Return the tables of the sweep file at a scale."""
        return dict(_merge(self.tables, self.scale(name).tables))

    def sweep(self, name: ScaleName, folder: Path) -> SweepFile:
        """Return the sweep at a scale; paths in it are relative to `folder`."""
        return parse_sweep(self.tables_at(name), self.where, folder)


@cache
def find_recipe(paper: str, table: str) -> SweepRecipe | None:
    """Return the recipe of a table; None where no sweep file has one."""
    path = PACKAGE_FOLDER / "sweeps" / f"{paper}-{table}.toml"
    if not path.exists():
        return None
    tables = read_toml(path)
    recipe = validate_tables(TableRecipe, tables.pop("reproduce", {}), f"{path.name}: reproduce")
    published = read_papers()[paper].table[table]
    for kind, used, declared in (
        ("row", recipe.rows, published.rows),
        ("quantity", {**recipe.quantities, **recipe.geometry}, published.quantities),
    ):
        for unknown in () if kind == "row" and published.more else used.keys() - declared.keys():
            raise ConfigError(f"{path.name}: no {kind} is called '{unknown}', {did_you_mean(unknown, declared)}")
    return SweepRecipe(recipe, tables, path.name)


def describe_reproduction(paper: str, table: str) -> str:
    """Say what makes a table again, a sweep at two scales or a script of the repository, and how long that takes."""
    if recipe := find_recipe(paper, table):
        return f"quick, {duration_text(recipe.recipe.quick.minutes)}; full, {duration_text(recipe.recipe.full.minutes)}"
    script = read_papers()[paper].table[table].script
    assert script is not None
    return (
        f"{Path(script.command).name}, {duration_text(script.minutes) if script.minutes else 'time not written down'}"
    )


def duration_text(minutes: float) -> str:
    """Format a time in minutes or hours.

    >>> duration_text(90), duration_text(180)
    ('90 min', '3 h')
    """
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def read_sweep_figures(recipe: TableRecipe, scores: Scores, decimals: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Read the figures of a sweep, by row and quantity; what was not run is left out."""
    figures = {}
    for row, labels in recipe.rows.items():
        lines = [line for line in scores.rows if _has_labels(line, labels)]
        texts = {}
        for name, reading in recipe.quantities.items():
            text = _figure(reading, lines, recipe, decimals[name])
            # An attack with a row of its own has the reason there, see `read_reasons`.
            if text and not (recipe.by_attack and text == REFUSED):
                texts[name] = text
        if texts:
            figures[row] = texts
    return figures


def read_reasons(recipe: TableRecipe, board: SweepBoard, figures: Mapping[str, object]) -> dict[str, str]:
    """Return by row without figures why the attack has none, where attacks have rows of their own.

    Args:
        recipe: with a row for each attack.
    """
    if not recipe.by_attack:
        return {}
    points = [(point.row, [reason]) for point, reason in board.plan.inapplicable]
    for cell in board.plan.cells:
        if marker := board.plan.finished_cells.get(cell.key):
            points.append((cell.point.row, [_VICTIM.sub("", failure) for failure in marker.failures]))
    reasons = {}
    for row, labels in recipe.rows.items():
        texts = dict.fromkeys(text for point, texts in points if _has_labels(point, labels) for text in texts)
        if row not in figures and texts:
            reasons[row] = join_first(list(texts), 1)
    return reasons


def _has_labels(line: Mapping[str, str], labels: Mapping[str, str | int | float]) -> bool:
    return all(line[axis] == str(label) for axis, label in labels.items())


def _figure(reading: FigureSource, lines: Sequence[Mapping[str, str]], recipe: TableRecipe, decimals: int) -> str:
    """Format mean and spread over victims and seeds, and over how many if some have none; empty if it was not run."""
    attack = reading.attack or (lines[0]["attack"] if lines else "")
    values = _values(reading, attack, lines)
    other_values = _values(reading, reading.minus or reading.over or attack, lines)
    if values is None or other_values is None:
        return ""
    if reading.minus is not None:
        values = {who: value - other_values.get(who, math.nan) for who, value in values.items()}
    defined, defined_others = defined_values(values), defined_values(other_values)
    if not defined or (reading.over is not None and not defined_others):
        return REFUSED
    if reading.over is not None:
        ratio = np.mean(list(defined.values())) / np.mean(list(defined_others.values()))
        return f"{ratio:.{decimals}f}"
    if recipe.by_attack and reading.metric == "seconds":
        # The first victim pays for what all share, so a spread over victims says nothing.
        return f"{np.mean(list(defined.values())):.{decimals}f}"
    sign = "+" if reading.minus is not None or reading.beyond_floor else ""
    text = format_figure(defined, decimals, recipe.spread, sign=sign)
    return text if len(defined) == len(values) else f"{text} ({len(defined)} of {len(values)})"


def defined_values(values: Mapping[Who, float]) -> dict[Who, float]:
    """Return the values that are not NaN."""
    return {who: value for who, value in values.items() if not math.isnan(value)}


def format_figure(values: Mapping[Who, float], decimals: int, spread: Spread, *, sign: str = "") -> str:
    """Format mean and spread of values that are not NaN; without a spread where there is one, or one is infinite.

    >>> format_figure({("0", "1"): -0.001}, 2, "standard error")
    '0.00'
    """
    array = np.array(list(values.values()))
    text = f"{array.mean():{sign}z.{decimals}f}"
    return (
        text
        if len(array) < 2 or np.isinf(array).any()
        else f"{text} ± {_spread_of_values(values, spread):.{decimals}f}"
    )


def _values(reading: FigureSource, attack: str, lines: Sequence[Mapping[str, str]]) -> dict[Who, float] | None:
    """Return values by victim and seed, NaN where the attack failed or has none; None where no cell was run."""
    metric = reading.of or reading.metric
    is_cell_column = not reading.of and reading.metric in ("accuracy", "seconds")
    column = reading.metric if is_cell_column else "value"
    if reading.of:
        column = "floor"
    values = {}
    for line in lines:
        same_attack = line["attack"] == attack and line["knows_defenses"] == str(int(reading.adaptive))
        if same_attack and (is_cell_column or line["metric"] in (metric, "")):
            who = tuple(line[name] for name in _WHO_COLUMNS)
            value = float(line[column] or "nan")
            if reading.beyond_floor:
                value -= float(line["floor"] or "nan")
            values[who] = reading.times * value
    return values or None


def _spread_of_values(values: Mapping[Who, float], spread: Spread) -> float:
    if spread == "95 % interval":
        by_victim_and_seed: dict[tuple[str, str], list[float]] = {}
        for (seed, victim, _, _), value in values.items():
            by_victim_and_seed.setdefault((victim, seed), []).append(value)
        means = {key: float(np.mean(several)) for key, several in by_victim_and_seed.items()}
        return mean_and_margin(means)[1]
    deviation = float(np.array(list(values.values())).std(ddof=1))
    return deviation / (math.sqrt(len(values)) if spread == "standard error" else 1.0)


def _merge(base: Any, changes: Any) -> Any:
    """Copy `base`, with `changes` in the place of what differs."""
    if isinstance(base, Mapping) and isinstance(changes, Mapping):
        return {key: _merge(base.get(key), changes.get(key, base.get(key))) for key in {**base, **changes}}
    return deepcopy(changes)
