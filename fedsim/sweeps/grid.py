"""The grid of a sweep: every combination of values of its axes, of attacks and of seeds, but for those excluded."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fedsim.auditing.plan import ADAPTIVE
from fedsim.errors import ConfigError, did_you_mean
from fedsim.experiments.config import Config
from fedsim.experiments.reading import make_absolute, put
from fedsim.sweeps.file import SweepFile
from fedsim.sweeps.labels import labels

ATTACK, SEED = "attack", "seed"
_LISTS = ("defense", "measure")
"""Tables of an experiment file that are lists, of which a value is all."""
_LABELLED = ("attack", "measure")
"""Those in which a `label` is a setting."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination.

    Attributes:
        labels: by axis, in the order of the sweep file; `attack` is one of them.
        values: by axis.
        seed: `federation.seed`.
        same: axes of tables that go together with another axis and are labelled as it is.
    """

    labels: Mapping[str, str]
    values: Mapping[str, Any]
    seed: int
    same: Collection[str] = ()

    @property
    def name(self) -> str:
        """Its labels and its seed in a line, each label of axes that go together once."""
        return ", ".join(f"{axis}={label}" for axis, label in self.row.items() if axis not in self.same)

    @property
    def row(self) -> dict[str, Any]:
        """Its columns in the tables of the sweep."""
        return {**self.labels, SEED: self.seed}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All combinations that a sweep file asks for.

    Attributes:
        file: the sweep file.
        axes: their keys but for `attack`, in the order of the file.
        attacks: the table of each attack of the axis, and of those that the base names.
        points: in the order of the tables.
    """

    file: SweepFile
    axes: tuple[str, ...]
    attacks: Sequence[dict[str, Any]]
    points: Sequence[Point]

    @property
    def labelled(self) -> tuple[str, ...]:
        """All axes, as in the labels of a point."""
        return tuple(self.points[0].labels)

    def tables(self, point: Point) -> dict[str, Any]:
        """The tables of the experiment at `point`, with its one attack.

        Raises:
            ConfigError: the base has no such table to set a key of.
        """
        tables = deepcopy(dict(self.file.base))
        for key in sorted(point.values, key=lambda key: key.count(".")):  # a table before the keys in it
            _set(tables, key, deepcopy(point.values[key]), f"{self.file.where}: sweep.axes: '{key}'")
        make_absolute(tables, self.file.where, self.file.folder)
        put(tables, "federation.seed", point.seed, self.file.where)
        return tables


def grid_of(file: SweepFile) -> Grid:
    """The grid that a sweep file describes.

    Raises:
        ConfigError: no attack is named, two values of an axis are called the same, or an exclusion names no cell.
    """
    axes = dict(file.sweep.axes)
    own = file.base.get(ATTACK, [])
    axes.setdefault(ATTACK, own if isinstance(own, list) else [own])
    _check_attacks(axes[ATTACK], file.where)
    _check_titles([*axes[ATTACK], *(own if isinstance(own, list) else [own])], file.where)
    named = {axis: _labelled(axis, values, file.where) for axis, values in axes.items()}
    seeds = file.sweep.seeds if file.sweep.seeds is not None else [_seed(file)]
    points = [
        Point(
            labels={axis: choice[axis][0] for axis in axes},
            values={axis: choice[axis][1] for axis in axes},
            seed=seed,
            same=_same(choice, file.sweep.zip),
        )
        for choice, seed in itertools.product(list(_choices(named, file.sweep.zip)), seeds)
    ]
    for place, exclusion in enumerate(file.sweep.exclude):
        where = f"{file.where}: sweep.exclude.{place}"
        _check_exclusion(exclusion, named, seeds, where)
        left = [point for point in points if not _excluded(point, exclusion)]
        if len(left) == len(points):
            raise ConfigError(f"{where}: no cell is {exclusion}; leave it out")
        points = left
    if not points:
        raise ConfigError(f"{file.where}: sweep.exclude: every cell is excluded; leave one of the exclusions out")
    attacks = [*axes[ATTACK], *(table for table in own if isinstance(table, dict) and table not in axes[ATTACK])]
    return Grid(file=file, axes=tuple(axis for axis in axes if axis != ATTACK), attacks=attacks, points=points)


def _check_attacks(values: Sequence[Any], where: str) -> None:
    if not values:
        raise ConfigError(f"{where}: attack: no attack is named, so nothing would be scored; add an axis 'attack'")
    for value in values:
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: sweep.axes: 'attack': expected a table for each value, such as {{ name = \"sme\" }}, got "
                f"{value!r}"
            )


def _check_titles(attacks: Sequence[Any], where: str) -> None:
    """Raise ConfigError where an attack is called as another one is that knows the defenses."""
    for attack in attacks:
        label = str(attack.get("label", "")) if isinstance(attack, Mapping) else ""
        if label.endswith(f" {ADAPTIVE}"):
            raise ConfigError(
                f"{where}: attack: '{label}' is what '{label.removesuffix(f' {ADAPTIVE}')}' is called where it knows "
                "the defenses; choose another label"
            )


def _seed(file: SweepFile) -> Any:
    federation = file.base.get("federation", {})
    default = Config.model_fields["federation"].default.seed
    return federation.get("seed", default) if isinstance(federation, dict) else default


def _labelled(axis: str, values: Sequence[Any], where: str) -> list[tuple[str, Any]]:
    """The values of an axis, each with its label."""
    named = labels(values)
    if twice := [name for name in named if named.count(name) > 1]:
        raise ConfigError(
            f"{where}: sweep.axes: '{axis}': two values are called '{twice[0]}'; leave one of them out, or give it a "
            "label of its own"
        )
    return list(zip(named, values, strict=True))


def _choices(
    named: Mapping[str, Sequence[tuple[str, Any]]], together: Sequence[Sequence[str]]
) -> Iterator[dict[str, tuple[str, Any]]]:
    """Every combination of labelled values, by axis; those of axes that go together keep step."""
    groups = {axis: next((tuple(keys) for keys in together if axis in keys), (axis,)) for axis in named}
    steps = [[dict(zip(keys, values, strict=True)) for values in zip(*(named[key] for key in keys), strict=True)]
             for keys in dict.fromkeys(groups.values())]  # fmt: skip
    for parts in itertools.product(*steps):
        yield {axis: value for part in parts for axis, value in part.items()}


def _same(choice: Mapping[str, tuple[str, Any]], together: Sequence[Sequence[str]]) -> list[str]:
    """See `Point.same`; equal numbers on two axes mean two things."""
    others = [(key, keys[0]) for keys in together for key in keys[1:]]
    return [key for key, first in others if choice[key][0] == choice[first][0] and isinstance(choice[key][1], Mapping)]


def _check_exclusion(
    exclusion: Mapping[str, Any], named: Mapping[str, Sequence[tuple[str, Any]]], seeds: Sequence[int], where: str
) -> None:
    """Raise ConfigError where an exclusion names an axis or a value that is not there."""
    if not exclusion:
        raise ConfigError(f"{where}: the table is empty; name axes and values, or leave it out")
    for axis, value in exclusion.items():
        if axis != SEED and axis not in named:
            raise ConfigError(f"{where}: '{axis}' is no axis, {did_you_mean(axis, [*named, SEED])}")
        known = [(str(seed), seed) for seed in seeds] if axis == SEED else named[axis]
        if not any(_is(value, *one) for one in known):
            raise ConfigError(
                f"{where}: {axis} = {value!r}: no value, {did_you_mean(str(value), [k for k, _ in known])}"
            )


def _excluded(point: Point, exclusion: Mapping[str, Any]) -> bool:
    return all(
        _is(value, str(point.seed), point.seed) if axis == SEED else _is(value, point.labels[axis], point.values[axis])
        for axis, value in exclusion.items()
    )


def _is(value: Any, label: str, known: Any) -> bool:
    """Whether `value` stands for a value of an axis: the same, or its label."""
    return value == label or (value == known and isinstance(value, bool) == isinstance(known, bool))


def _set(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `key` to a value of an axis; an empty list leaves a table out."""
    first, _, rest = key.partition(".")
    if not rest and first not in _LABELLED:
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict):
                table.pop("label", None)
    if rest:
        put(tables, key, value, where)
    elif value == [] and first not in _LISTS:
        tables.pop(first, None)
    else:
        tables[first] = [value] if first in (*_LISTS, ATTACK) and isinstance(value, dict) else value
