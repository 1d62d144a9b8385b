"""Read a sweep file: the [sweep] table, and the experiment from which every cell starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedsim.base.constraints import NonNegativeInt
from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import check_possible, make_absolute, read_toml, set_value
from fedsim.federation.table import Table
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import is_in_run_folder
from fedsim.plugins.allowed_code import allow_code

SERIAL = ("engine", "actors", "address", "gpus_per_actor", "supernodes")
"""Keys of [federation] that a cell does not have, as it runs in one process."""
OVERRIDDEN = (*(f"federation.{key}" for key in SERIAL), "adversary.when", "adversary.workers")
"""Keys of an experiment file whose values have no effect in a cell, for that reason."""
CASE = "case"
"""Axis whose values are tables of an experiment file, each with a label."""


class SweepTable(Table):
    """[sweep]: the grid of experiments, and where its cells run.

    Cells without a defense run first.
    """

    base: str | None = Field(
        default=None,
        description="Experiment file from which every cell starts, relative to the sweep file; by default the "
        "other tables of the sweep file are the experiment.",
    )
    axes: dict[str, list[Any]] = Field(
        default={},
        description="Keys of an experiment file, each with a list of values, or `case`, whose values are tables of "
        "such keys; every combination is a cell.",
    )
    zip: list[list[str]] = Field(default=[], description="Lists of axes that vary together.")
    exclude: list[dict[str, Any]] = Field(
        default=[], description="Cells that are left out, by labels or values of axes."
    )
    only: list[dict[str, Any]] = Field(
        default=[], description="Cells to which the sweep is limited, by labels or values of axes; by default all."
    )
    seeds: list[NonNegativeInt] | None = Field(
        default=None, description="Values of `federation.seed`; by default that of the experiment."
    )
    stop_without_leak: bool = Field(
        default=False,
        description="Whether all other cells are skipped if no attack leaks without a defense.",
    )
    on: Literal["processes", "ray"] = Field(
        default="processes", description="Where cells run: in processes on this machine, or on Ray."
    )
    address: str | None = Field(default=None, description="On Ray, the cluster to join.")
    workers: int | None = Field(
        default=None, ge=1, le=4096, description="Number of cells that run at once; by default one per core."
    )


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """Contents of a sweep file.

    Attributes:
        folder: folder to which paths in values of axes are relative.
        base: the tables of the experiment from which every cell starts, as in an experiment file.
        is_own: whether the user wrote both files, so that code which they name may be imported.
    """

    where: str
    folder: Path
    sweep: SweepTable
    base: Mapping[str, Any]
    is_own: bool

    @property
    def tables(self) -> dict[str, Any]:
        """Return the contents as the tables of a single file."""
        return {"sweep": self.sweep.model_dump(exclude_none=True, exclude={"base"}), **self.base}


def read_sweep(path: Path, changes: Iterable[tuple[str, Any]] = (), kind: type[AttackFile] = Config) -> SweepFile:
    """Read the sweep file at `path`.

    Args:
        changes: keys and values to set, of the base or of [sweep] itself, such as `sweep.seeds`.
        kind: of the file from which every cell starts, whose tables axes may name.
    """
    is_own = not is_in_run_folder(path)
    return parse_sweep(read_toml(path), str(path), path.parent, is_own=is_own, changes=changes, kind=kind)


def parse_sweep(
    tables: dict[str, Any],
    where: str,
    folder: Path,
    *,
    is_own: bool = True,
    changes: Iterable[tuple[str, Any]] = (),
    kind: type[AttackFile] = Config,
) -> SweepFile:
    """Parse the tables of a sweep file, see `read_sweep`.

    Args:
        tables: [sweep], and the experiment's unless a base is named; they are changed.
    """
    check_possible(tables, where)
    sweep_table = tables.pop("sweep", None)
    if not isinstance(sweep_table, dict):
        raise ConfigError(f"{where}: has no [sweep] table, so it is not a sweep; `fedsim run` runs a single experiment")
    _check_misplaced_keys(tables, where)
    base, base_folder = tables, folder
    changes = list(changes)
    # Change [sweep] first, as a change may set the base.
    for key, value in changes:
        if key == "sweep":
            raise ConfigError("set sweep: name a key of it, such as sweep.seeds")
        if key.startswith("sweep."):
            set_value({"sweep": sweep_table}, key, value, f"set {key}")
    # Read the base.
    if isinstance(name := sweep_table.get("base"), str):
        if tables:
            raise ConfigError(
                f"{where}: {next(iter(tables))}: the experiment is in {name} (sweep.base); write "
                "this there, or leave base out and write the whole experiment here"
            )
        file = folder / Path(name).expanduser()
        base, base_folder, is_own = read_toml(file), file.parent, is_own and not is_in_run_folder(file)
        if "sweep" in base:
            raise ConfigError(f"{where}: sweep.base: {file} is a sweep; name the file of a single experiment")
    for key, value in changes:
        if not key.startswith("sweep."):
            set_value(base, key, value, f"set {key}")
    # Validate [sweep].
    if isinstance(sweep_table.get("axes"), dict):
        sweep_table["axes"] = _flatten_axes(sweep_table["axes"], f"{where}: sweep.axes")
    if is_own:
        allow_code(sweep_table, base)
    make_absolute(base, where, base_folder)
    sweep = validate_tables(SweepTable, sweep_table, f"{where}: sweep")
    _check_axes(sweep, f"{where}: sweep", kind)
    _check_seeds(sweep, f"{where}: sweep")
    if sweep.address is not None and sweep.on != "ray":
        raise ConfigError(f'{where}: sweep.address: is that of a Ray cluster; add on = "ray", or leave it out')
    _check_zip(sweep, f"{where}: sweep")
    return SweepFile(where=where, folder=folder, sweep=sweep, base=base, is_own=is_own)


def _check_misplaced_keys(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a key of [sweep] stands outside of it."""
    for key, value in tables.items():
        if key in set(SweepTable.model_fields) - set(Config.model_fields):
            if isinstance(value, list) and any(isinstance(item, dict) for item in value):
                form = f"[[sweep.{key}]]"
            elif isinstance(value, dict):
                form = f"[sweep.{key}]"
            else:
                form = f"{key} below [sweep]"
            raise ConfigError(f"{where}: {key}: is a key of the sweep; write {form}")


def _flatten_axes(axes: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Return axes by their whole key, as TOML reads keys with dots, without quotes, as tables."""
    flat: dict[str, Any] = {}
    for key, values in axes.items():
        path = f"{prefix}{key}"
        inner_axes = _flatten_axes(values, where, f"{path}.") if isinstance(values, dict) else {path: values}
        for axis, value in inner_axes.items():
            if axis in flat:
                raise ConfigError(f"{where}: '{axis}' is there twice, with quotes and without; leave one of them out")
            flat[axis] = value
    return flat


def _check_axes(sweep: SweepTable, where: str, kind: type[AttackFile]) -> None:
    """Raise ConfigError where an axis is invalid, whatever the experiment is."""
    for key, values in sweep.axes.items():
        if key == CASE:
            for value in values:
                _check_case(value, f"{where}.axes: '{CASE}'", kind)
        else:
            _check_key(key, f"{where}.axes: '{key}'", kind)
        keys = {key}
        for value in values:
            if isinstance(value, dict):
                keys.update(f"{key}.{inner}" for inner in value)
        for full_key in keys:
            _check_settable(full_key, f"{where}.axes: '{key}'")
        if not values:
            raise ConfigError(f"{where}.axes: '{key}': the list is empty; name values, or leave the axis out")


def _check_case(value: Any, where: str, kind: type[AttackFile]) -> None:
    """Raise ConfigError where a value of `case` is no table of an experiment file with a label."""
    if not isinstance(value, dict) or not isinstance(value.get("label"), str):
        raise ConfigError(
            f"{where}: expected tables with a label and what differs, such as "
            f'{{ label = "long", training.local_epochs = 5 }}, got {value!r}'
        )
    for table, settings in value.items():
        if table == "label":
            continue
        _check_key(table, f"{where}: {value['label']}: '{table}'", kind)
        if isinstance(settings, dict):
            for key in settings:
                _check_settable(f"{table}.{key}", f"{where}: {value['label']}")


def _check_seeds(sweep: SweepTable, where: str) -> None:
    if sweep.seeds is None:
        return
    if not sweep.seeds:
        raise ConfigError(f"{where}.seeds: the list is empty; name seeds, or leave it out")
    if duplicates := [seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1]:
        raise ConfigError(f"{where}.seeds: {duplicates[0]} is named twice; name each once")


def _check_zip(sweep: SweepTable, where: str) -> None:
    zipped = [key for keys in sweep.zip for key in keys]
    for key in zipped:
        if key not in sweep.axes:
            raise ConfigError(f"{where}.zip: '{key}' is not an axis, {did_you_mean(key, sweep.axes)}")
        if zipped.count(key) > 1:
            raise ConfigError(f"{where}.zip: '{key}' is named twice; name each once")
    for keys in sweep.zip:
        lengths = {key: len(sweep.axes[key]) for key in keys}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"'{key}' has {count} values" for key, count in lengths.items())
            raise ConfigError(f"{where}.zip: {counts}; axes that go together have equally many")


def _check_settable(key: str, where: str) -> None:
    """Raise ConfigError where the sweep itself determines the value of `key` in each cell."""
    if key == "federation.seed":
        raise ConfigError(f"{where}: write the values as seeds = [...] in [sweep]")
    if key in OVERRIDDEN:
        raise ConfigError(
            f"{where}: '{key}' is the same in all cells, each of which runs in one process; leave "
            "it out, and say with on and workers in [sweep] where cells run"
        )


def _check_key(key: str, where: str, kind: type[AttackFile]) -> None:
    """Raise ConfigError where `key` cannot be one of an experiment file."""
    first = key.split(".")[0].strip()
    if not all(word.strip() for word in key.split(".")):
        raise ConfigError(f"{where}: expected a key of an experiment file, such as 'training.local_epochs'")
    if first not in kind.model_fields:
        raise ConfigError(f"{where} names no key of an experiment file, {did_you_mean(first, kind.model_fields)}")
