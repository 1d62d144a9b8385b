"""The grid of a sweep: all combinations of values of axes, attacks and seeds, with exclusions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fedsim.audit.plan import ADAPTIVE
from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.federation.config import Config
from fedsim.federation.experiment_file import make_absolute, set_value
from fedsim.sweeps.file import CASE, SweepFile
from fedsim.sweeps.labels import label_values

ATTACK, SEED, DEFENSE = "attack", "seed", "defense"
_LIST_TABLES = (DEFENSE, "measure")
"""Lists of tables in an experiment file, which a value of an axis replaces as a whole."""
_TABLES_WITH_LABEL = ("attack", "measure")
"""Tables in which `label` is a setting."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One combination of values.

    Attributes:
        labels: labels of values by axis, in the order of the sweep file; `attack` is one of the
            axes.
        seed: `federation.seed`.
        same: axes of tables that vary together with another axis and have the same label.
        is_added: whether the sweep adds it, as the control of cells with a defense.
    """

    labels: Mapping[str, str]
    values: Mapping[str, Any]
    seed: int
    same: Collection[str] = ()
    is_added: bool = False

    @property
    def name(self) -> str:
        """Return labels and seed in a line; zipped axes with equal labels appear once."""
        return ", ".join(f"{axis}={label}" for axis, label in self.row.items() if axis not in self.same)

    @property
    def row(self) -> dict[str, Any]:
        """Return its columns in the tables of the sweep."""
        return {**self.labels, SEED: self.seed}


@dataclass(frozen=True, kw_only=True)
class SweepGrid:
    """All combinations that a sweep file describes.

    Attributes:
        axes: keys of all axes except `attack`, in the order of the file.
        attacks: tables of the attacks of the axis, and of those that the base names.
        points: combinations, in the order of the sweep's tables.
    """

    file: SweepFile
    axes: tuple[str, ...]
    attacks: Sequence[dict[str, Any]]
    points: Sequence[GridPoint]

    @property
    def label_axes(self) -> tuple[str, ...]:
        """Return all axes, as in the labels of a point."""
        return tuple(self.points[0].labels)

    def tables(self, point: GridPoint) -> dict[str, Any]:
        """Return the tables of the experiment at `point`, with its one attack."""
        tables = deepcopy(dict(self.file.base))
        # A table before the keys in it, and a case, which changes what other axes say, at the end.
        for key in sorted(point.values, key=lambda key: (key == CASE, key.count("."))):
            _set_axis_value(tables, key, deepcopy(point.values[key]), f"{self.file.where}: sweep.axes: '{key}'")
        make_absolute(tables, self.file.where, self.file.folder)
        set_value(tables, "federation.seed", point.seed, self.file.where)
        if point.is_added:
            tables[DEFENSE] = []
        return tables


def build_grid(file: SweepFile) -> SweepGrid:
    """Build the grid that a sweep file describes."""
    # Label the values of all axes.
    axes = dict(file.sweep.axes)
    base_attacks = file.base.get(ATTACK, [])
    base_list = base_attacks if isinstance(base_attacks, list) else [base_attacks]
    if _is_list_of_tables(file.base.get(DEFENSE)):
        axes.setdefault(DEFENSE, [file.base[DEFENSE]])  # which tells defended cells from their controls
    axes.setdefault(ATTACK, base_list)
    _check_attacks(axes[ATTACK], file.where)
    _check_titles([*axes[ATTACK], *base_list], file.where)
    labelled_axes = {axis: _label_axis(axis, values, file.where) for axis, values in axes.items()}
    seeds = file.sweep.seeds if file.sweep.seeds is not None else [_base_seed(file)]
    # Combine them.
    points: list[GridPoint] = []
    for choice, seed in itertools.product(list(_combinations(labelled_axes, file.sweep.zip)), seeds):
        point = GridPoint(
            labels={axis: choice[axis][0] for axis in axes},
            values={axis: choice[axis][1] for axis in axes},
            seed=seed,
            same=_axes_with_same_label(choice, file.sweep.zip),
        )
        points.append(point)
    # Drop excluded ones.
    for number, exclusion in enumerate(file.sweep.exclude):
        where = f"{file.where}: sweep.exclude.{number}"
        _check_exclusion(exclusion, labelled_axes, seeds, where)
        remaining = [point for point in points if not _agrees_with(point, exclusion)]
        if len(remaining) == len(points):
            raise ConfigError(f"{where}: no cell is {exclusion}; leave it out")
        points = remaining
    # Drop all but those that are asked for.
    for number, wanted in enumerate(file.sweep.only):
        _check_exclusion(wanted, labelled_axes, seeds, f"{file.where}: sweep.only.{number}")
    if file.sweep.only:
        points = [point for point in points if any(_agrees_with(point, wanted) for wanted in file.sweep.only)]
        if not points:
            raise ConfigError(f"{file.where}: sweep.only: no cell is any of these; name others, or leave it out")
    if not points:
        raise ConfigError(f"{file.where}: sweep.exclude: every cell is excluded; leave one of the exclusions out")
    attacks = list(axes[ATTACK])
    attacks += [table for table in base_attacks if isinstance(table, dict) and table not in axes[ATTACK]]
    return SweepGrid(
        file=file,
        axes=tuple(axis for axis in axes if axis != ATTACK),
        attacks=attacks,
        points=points,
    )


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _check_attacks(values: Sequence[Any], where: str) -> None:
    if not values:
        raise ConfigError(f"{where}: attack: no attack is named, so nothing would be scored; add an axis 'attack'")
    for value in values:
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: sweep.axes: 'attack': expected a table for each value, such as "
                f'{{ name = "sme" }}, got {value!r}'
            )


def _check_titles(attacks: Sequence[Any], where: str) -> None:
    """Raise ConfigError where a label is the one of another attack that knows the defenses."""
    for attack in attacks:
        label = str(attack.get("label", "")) if isinstance(attack, Mapping) else ""
        if label.endswith(f" {ADAPTIVE}"):
            raise ConfigError(
                f"{where}: attack: '{label}' is what '{label.removesuffix(f' {ADAPTIVE}')}' is "
                "called where it knows the defenses; choose another label"
            )


def _base_seed(file: SweepFile) -> Any:
    federation = file.base.get("federation", {})
    default = Config.model_fields["federation"].default.seed
    return federation.get("seed", default) if isinstance(federation, dict) else default


def _label_axis(axis: str, values: Sequence[Any], where: str) -> list[tuple[str, Any]]:
    """Return the values of an axis, each after its label."""
    value_labels = label_values(values)
    if duplicates := [label for label in value_labels if value_labels.count(label) > 1]:
        raise ConfigError(
            f"{where}: sweep.axes: '{axis}': two values are called '{duplicates[0]}'; leave one of "
            "them out, or give it a label of its own"
        )
    return list(zip(value_labels, values, strict=True))


def _combinations(
    labelled_axes: Mapping[str, Sequence[tuple[str, Any]]], zipped: Sequence[Sequence[str]]
) -> Iterator[dict[str, tuple[str, Any]]]:
    """Yield every combination of labelled values by axis; axes of a group in `zipped` keep step."""
    # Group the axes, in the order of their first axis.
    groups: dict[tuple[str, ...], None] = {}
    for axis in labelled_axes:
        group = next((tuple(keys) for keys in zipped if axis in keys), (axis,))
        groups[group] = None
    # A step of a group is a value for each of its axes.
    steps_by_group: list[list[dict[str, tuple[str, Any]]]] = []
    for keys in groups:
        rows = zip(*(labelled_axes[key] for key in keys), strict=True)
        steps_by_group.append([dict(zip(keys, row, strict=True)) for row in rows])
    for steps in itertools.product(*steps_by_group):
        combination: dict[str, tuple[str, Any]] = {}
        for step in steps:
            combination |= step
        yield combination


def _axes_with_same_label(choice: Mapping[str, tuple[str, Any]], zipped: Sequence[Sequence[str]]) -> list[str]:
    """Return the axes of tables that have the label of the first axis of their group."""
    same: list[str] = []
    for keys in zipped:
        for key in keys[1:]:
            label, value = choice[key]
            first_label, _ = choice[keys[0]]
            # Equal numbers on two axes mean two things, so only tables count.
            if label == first_label and isinstance(value, Mapping):
                same.append(key)
    return same


def _check_exclusion(
    exclusion: Mapping[str, Any],
    labelled_axes: Mapping[str, Sequence[tuple[str, Any]]],
    seeds: Sequence[int],
    where: str,
) -> None:
    """Raise ConfigError where an entry of `exclude` or `only` names an unknown axis or value."""
    if not exclusion:
        raise ConfigError(f"{where}: the table is empty; name axes and values, or leave it out")
    for axis, value in exclusion.items():
        if axis != SEED and axis not in labelled_axes:
            raise ConfigError(f"{where}: '{axis}' is not an axis, {did_you_mean(axis, [*labelled_axes, SEED])}")
        known = [(str(seed), seed) for seed in seeds] if axis == SEED else labelled_axes[axis]
        if not any(_matches(value, label, known_value) for label, known_value in known):
            known_labels = [label for label, _ in known]
            raise ConfigError(f"{where}: {axis} = {value!r}: no value, {did_you_mean(str(value), known_labels)}")


def _agrees_with(point: GridPoint, wanted: Mapping[str, Any]) -> bool:
    """Return whether a point has all these values or labels."""
    for axis, value in wanted.items():
        if axis == SEED:
            label, known = str(point.seed), point.seed
        else:
            label, known = point.labels[axis], point.values[axis]
        if not _matches(value, label, known):
            return False
    return True


def _matches(value: Any, label: str, known: Any) -> bool:
    """Return whether `value` is the value `known` of an axis, or its label, in which * stands for any text."""
    if isinstance(value, str) and "*" in value:
        return re.fullmatch(".*".join(map(re.escape, value.split("*"))), label) is not None
    return value == label or (value == known and isinstance(value, bool) == isinstance(known, bool))


def _set_axis_value(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `key` to a value of an axis; an empty list removes a table."""
    first, _, rest = key.partition(".")
    if key == CASE:
        settings = {table: keys for table, keys in value.items() if table != "label"}
        merged = _merge_settings(tables, settings)
        tables.clear()
        tables.update(merged)
        return
    if not rest and first not in _TABLES_WITH_LABEL:
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict):
                table.pop("label", None)
    if rest:
        set_value(tables, key, value, where)
    elif value == [] and first not in _LIST_TABLES:
        tables.pop(first, None)
    else:
        tables[first] = [value] if first in (*_LIST_TABLES, ATTACK) and isinstance(value, dict) else value


def _merge_settings(old: Any, settings: Any) -> Any:
    """Change settings; a table of another name takes the old one's place, and an empty list leaves a key out."""
    if not (isinstance(old, Mapping) and isinstance(settings, Mapping)):
        return settings
    if "name" in settings and settings["name"] != old.get("name"):
        return settings
    merged = dict(old)
    for key, value in settings.items():
        if value == []:
            merged.pop(key, None)
        else:
            merged[key] = _merge_settings(old.get(key), value)
    return merged
