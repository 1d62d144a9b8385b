"""Reads a sweep file: the [sweep] table, and the experiment from which every cell starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedsim.errors import ConfigError, did_you_mean
from fedsim.experiments.config import Config, Table, check
from fedsim.experiments.reading import check_possible, make_absolute, put, read_toml
from fedsim.experiments.trust import is_in_a_run
from fedsim.plugins.allowed_code import allow_code

SERIAL = ("engine", "actors", "address", "gpus_per_actor", "supernodes")
"""Keys of [federation] that a cell does not have: it runs in one process, beside others."""
OVERRIDDEN = (*(f"federation.{key}" for key in SERIAL), "adversary.when", "adversary.workers")
"""Keys of an experiment file whose values mean nothing in a cell, for that reason."""


class SweepTable(Table):
    """[sweep]: which experiments.

    `base` is an experiment file, relative to the sweep file; without it, the tables beside [sweep] are the experiment.
    Each of `axes` is a key of an experiment file with a list of values; `zip` names axes that go together, and
    `exclude` cells that are left out, by the labels or values of axes. `seeds` are values of `federation.seed`.

    Cells run in processes on this machine, `workers` of them at once (default: one a core), or `on = "ray"`, where
    `address` is a cluster to join.
    """

    base: str | None = None
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    zip: list[list[str]] = Field(default_factory=list)
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    seeds: list[Annotated[int, Field(ge=0)]] | None = None
    on: Literal["processes", "ray"] = "processes"
    address: str | None = None
    workers: int | None = Field(default=None, ge=1, le=4096)


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """What a sweep file says.

    Attributes:
        where: what messages call it.
        folder: to which paths in values of axes are relative.
        sweep: its [sweep] table.
        base: the tables of the experiment from which every cell starts, as in an experiment file.
        own: whether the user wrote both files, so that code which they name may be imported.
    """

    where: str
    folder: Path
    sweep: SweepTable
    base: Mapping[str, Any]
    own: bool

    @property
    def tables(self) -> dict[str, Any]:
        """The same as the tables of one file."""
        return {"sweep": self.sweep.model_dump(exclude_none=True, exclude={"base"}), **self.base}


def read_sweep(path: Path, changes: Iterable[tuple[str, Any]] = ()) -> SweepFile:
    """What the sweep file at `path` says.

    Args:
        changes: keys and values that it is to have, of the base or of [sweep] itself, such as `sweep.seeds`.

    Raises:
        ConfigError: a file is missing or is not TOML, or [sweep] is missing or says something that does not hold.
    """
    return sweep_of(read_toml(path), str(path), path.parent, own=not is_in_a_run(path), changes=changes)


def sweep_of(
    tables: dict[str, Any], where: str, folder: Path, *, own: bool = True, changes: Iterable[tuple[str, Any]] = ()
) -> SweepFile:
    """The same for the tables of a sweep file; see `read_sweep`.

    Args:
        tables: [sweep], and the experiment's unless a base is named; they are changed.
        where: what messages call them.
        folder: to which paths are relative.
        own: whether they are the user's own.
    """
    check_possible(tables, where)
    if not isinstance(said := tables.pop("sweep", None), dict):
        raise ConfigError(f"{where}: has no [sweep] table, so it is no sweep; `fedsim run` runs a single experiment")
    _check_place(tables, where)
    base, beside = tables, folder
    changes = list(changes)
    for key, value in changes:  # one may be `base`, so before that is read
        if key == "sweep":
            raise ConfigError("set sweep: name a key of it, such as sweep.seeds")
        if key.startswith("sweep."):
            put({"sweep": said}, key, value, f"set {key}")
    if isinstance(name := said.get("base"), str):
        if tables:
            raise ConfigError(
                f"{where}: {next(iter(tables))}: the experiment is in {name} (sweep.base); write this there, or leave "
                "base out and write the whole experiment here"
            )
        file = folder / Path(name).expanduser()
        base, beside, own = read_toml(file), file.parent, own and not is_in_a_run(file)
        if "sweep" in base:
            raise ConfigError(f"{where}: sweep.base: {file} is a sweep; name the file of a single experiment")
    for key, value in changes:
        if not key.startswith("sweep."):
            put(base, key, value, f"set {key}")
    if isinstance(said.get("axes"), dict):
        said["axes"] = _flat(said["axes"], f"{where}: sweep.axes")
    if own:
        allow_code(said, base)
    make_absolute(base, where, beside)
    sweep = check(SweepTable, said, f"{where}: sweep")
    _check(sweep, f"{where}: sweep")
    return SweepFile(where=where, folder=folder, sweep=sweep, base=base, own=own)


def _check_place(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a key of [sweep] stands beside it."""
    for key, value in tables.items():
        if key in set(SweepTable.model_fields) - set(Config.model_fields):
            named = f"sweep.{key}"
            of_tables = isinstance(value, list) and any(isinstance(item, dict) for item in value)
            form = f"[[{named}]]" if of_tables else f"[{named}]" if isinstance(value, dict) else f"{key} below [sweep]"
            raise ConfigError(f"{where}: {key}: is a key of the sweep; write {form}")


def _flat(axes: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Axes by their whole key, for `training.local_epochs = [1, 5]` without quotes is a table in TOML."""
    found: dict[str, Any] = {}
    for key, values in axes.items():
        inner = f"{prefix}{key}"
        for full, value in (_flat(values, where, f"{inner}.") if isinstance(values, dict) else {inner: values}).items():
            if full in found:
                raise ConfigError(f"{where}: '{full}' is there twice, with quotes and without; leave one of them out")
            found[full] = value
    return found


def _check(sweep: SweepTable, where: str) -> None:
    """Raise ConfigError where the axes cannot be, whatever the experiment is."""
    for key, values in sweep.axes.items():
        _check_key(key, f"{where}.axes: '{key}'")
        for full in {key, *(f"{key}.{inner}" for value in values if isinstance(value, dict) for inner in value)}:
            _check_free(full, f"{where}.axes: '{key}'")
        if not values:
            raise ConfigError(f"{where}.axes: '{key}': the list is empty; name values, or leave the axis out")
    if sweep.seeds is not None:
        if not sweep.seeds:
            raise ConfigError(f"{where}.seeds: the list is empty; name seeds, or leave it out")
        if twice := [seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1]:
            raise ConfigError(f"{where}.seeds: {twice[0]} is named twice; name each once")
    if sweep.address is not None and sweep.on != "ray":
        raise ConfigError(f'{where}.address: is that of a Ray cluster; add on = "ray", or leave it out')
    together = [key for keys in sweep.zip for key in keys]
    for key in together:
        if key not in sweep.axes:
            raise ConfigError(f"{where}.zip: '{key}' is no axis, {did_you_mean(key, sweep.axes)}")
        if together.count(key) > 1:
            raise ConfigError(f"{where}.zip: '{key}' is named twice; name each once")
    for keys in sweep.zip:
        lengths = {key: len(sweep.axes[key]) for key in keys}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"'{key}' has {count} values" for key, count in lengths.items())
            raise ConfigError(f"{where}.zip: {told}; axes that go together have equally many")


def _check_free(key: str, where: str) -> None:
    """Raise ConfigError where the sweep itself says what `key` is in each cell."""
    if key == "federation.seed":
        raise ConfigError(f"{where}: write the values as seeds = [...] in [sweep]")
    if key in OVERRIDDEN:
        raise ConfigError(
            f"{where}: '{key}' is the same in all cells, each of which runs in one process; leave it out, and say with "
            "on and workers in [sweep] where cells run"
        )


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError where `key` cannot be one of an experiment file."""
    first = key.split(".")[0].strip()
    if not all(word.strip() for word in key.split(".")):
        raise ConfigError(f"{where}: expected a key of an experiment file, such as 'training.local_epochs'")
    if first not in Config.model_fields:
        raise ConfigError(f"{where} names no key of an experiment file, {did_you_mean(first, Config.model_fields)}")
