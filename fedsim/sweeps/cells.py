"""The cells of a sweep, each with the hash of what it follows from, by which it is found again.

A cell is one attack on one federation, and all cells of a federation share its recording. A hash covers settings,
whose code is not fedsim's own, the data, the files that settings name, and the versions of packages. Labels are not
among them, nor where and how a federation runs: its engine does not change what it sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.attacks import NO_ATTACKS
from fedsim.auditing.plan import in_order
from fedsim.auditing.threat_model import device_of
from fedsim.content_hashes import hash_of, hash_of_files, hash_of_parts
from fedsim.datasets.cache import files_of
from fedsim.errors import ConfigError, DataError, PluginError, what_it_said
from fedsim.experiments.build import Experiment, build_attacks, data_folder, resolve
from fedsim.experiments.config import AdversaryTable, AttackFile, Config, check
from fedsim.experiments.reading import config_of
from fedsim.experiments.settings import LAUNCH, code_of, hashes_of_files, versions
from fedsim.experiments.trust import check_trust
from fedsim.metrics import LPIPS_FILE
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import references_in
from fedsim.plugins.code import code_hash, hash_of_references
from fedsim.sweeps.dataset_hash import hash_of_dataset
from fedsim.sweeps.file import SERIAL
from fedsim.sweeps.grid import Grid, Point

_LENGTH = 16
"""Hexadecimal digits of a key."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attack on one federation.

    Attributes:
        point: where in the grid it is.
        config: its experiment, with every setting written out, as its run folder holds it.
        title: what its attack is called there; others are those that it builds on.
        federation: hash of what its federation follows from.
        key: hash of what its findings and scores follow from.
    """

    point: Point
    config: Config
    title: str
    federation: str = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        federation = federation_key(self.config)
        object.__setattr__(self, "federation", federation)
        object.__setattr__(self, "key", _key({"federation": federation} | _attack(self.config, self.title)))

    @property
    def baseline(self) -> bool:
        """Whether its attack counts as none: it reads a model as it was sent, or one that only the evaluator has."""
        return self.config.attack[-1].settings.get("source") in NO_ATTACKS

    @property
    def federated(self) -> Config:
        """The experiment of its federation, which nobody attacks."""
        return self.config.model_copy(update={"attack": [], "adversary": AdversaryTable(when="never")})


@dataclass(frozen=True)
class Unread:
    """A point whose settings contradict one another."""

    point: Point
    reason: str


def federation_key(config: Config) -> str:
    """Hash of what a federation, its recording and its accuracy follow from.

    Args:
        config: with every setting written out, as by `resolve`.
    """
    return _key(_federation(config))


def cells_of(grid: Grid, *, trust: bool) -> list[Cell | Unread]:
    """The cell at each point of `grid`, or why there cannot be one.

    A value of an axis with which no cell can be is a mistake, one with which some cells can be is not.

    Args:
        trust: import code that a file in a run folder names.

    Raises:
        ConfigError: such a mistake, or two cells have the same settings.
        DataError: data are missing.
        PluginError: nobody registered a name, or a plug-in does not load.
    """
    _data_in.cache_clear()  # files may have changed since
    found: list[Cell | Unread] = []
    for point in grid.points:
        try:
            found.append(_cell(grid, point, trust=trust))
        except ConfigError as error:
            found.append(Unread(point, str(error)))
    _check_values(found, grid.file.where)
    _check_different([item for item in found if isinstance(item, Cell)], grid.file.where)
    return found


def _check_values(found: Sequence[Cell | Unread], where: str) -> None:
    """Raise ConfigError where a value of an axis makes every cell unreadable."""
    readable = {place for item in found if isinstance(item, Cell) for place in item.point.row.items()}
    for item in found:
        if isinstance(item, Unread) and not readable.issuperset(item.point.row.items()):
            raise ConfigError(
                f"{where}: {item.reason.removeprefix(f'{where}: ')}; so it is in the cell {item.point.name}"
            )


def _check_different(cells: Sequence[Cell], where: str) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.key, cell)) is not cell:
            raise ConfigError(
                f"{where}: these two cells have the same settings: {other.point.name}; and {cell.point.name}; leave a "
                "value out, or exclude one of them with [[sweep.exclude]]"
            )


def _cell(grid: Grid, point: Point, *, trust: bool) -> Cell:
    tables, where = grid.tables(point), grid.file.where
    attack = tables["attack"][0]
    tables["attack"] = _with_sources(attack, grid.attacks, where)
    config = config_of(tables, where, grid.file.folder)
    check_trust(config, Path(grid.file.where), trust or grid.file.own)
    config = resolve(_in_one_process(config))
    _check_settings(config)
    return Cell(point=point, config=config, title=config.attack[-1].title)


def _check_settings(config: Config) -> None:
    """Raise ConfigError where settings are none that anybody could work with, whatever the data are."""
    experiment = Experiment(config)
    parts = experiment.training, experiment.new_strategy(), experiment.defenses, experiment.gauges
    del parts
    in_order({table.title: attack.builds_on for table, attack in build_attacks(config)}, known=True)


def _with_sources(attack: Mapping[str, Any], known: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """The tables of the attacks that `attack` builds on, and its own; alone it needs no label."""
    tables = [dict(attack)]
    while (title := _builds_on(tables[0], where)) is not None:
        sources = [dict(table) for table in known if title in (table.get("label"), table.get("name"))]
        if not sources or sources[0] in tables:  # `in_order` says what is wrong
            break
        tables = [*sources, *tables]
    if len(tables) == 1:
        tables[0].pop("label", None)
    return tables


def _builds_on(table: Mapping[str, Any], where: str) -> str | None:
    [(_, attack)] = build_attacks(check(AttackFile, {"attack": [dict(table)]}, where))
    return attack.builds_on


def _in_one_process(config: Config) -> Config:
    """The same experiment as it runs beside other cells: on one core, without processes of its own."""
    federation = config.federation.model_dump(exclude=set(SERIAL), exclude_none=True)
    adversary = config.adversary.model_copy(update={"when": "at-end", "workers": 1})
    return config.model_copy(update={"federation": type(config.federation)(**federation), "adversary": adversary})


def _key(parts: Mapping[str, Any]) -> str:
    return hash_of_parts(parts)[:_LENGTH]


def _federation(config: Config) -> dict[str, Any]:
    tables = config.model_dump(mode="json", exclude_none=True, exclude=set(AttackFile.model_fields))
    for key in LAUNCH:
        if key != "evaluate_every":
            tables["federation"].pop(key, None)
    tables["recording"].pop("fsync")
    return {"experiment": tables, "code": code_of(config), "data": _data(config), "files": hashes_of_files(config)} | {
        "versions": versions()
    }


def _attack(config: Config, title: str) -> dict[str, Any]:
    """What findings and scores follow from besides."""
    adversary = config.adversary.model_dump(mode="json", exclude_none=True, exclude={"when", "workers"})
    attacks = [table.model_dump(mode="json", exclude_none=True) for table in config.attack]
    settings = [adversary, *({**table, "name": None} for table in attacks)]
    weights = None if (home := data_folder()) is None else home / "weights" / LPIPS_FILE
    return {
        "adversary": adversary | {"device": str(device_of(config.adversary.device))},
        "attack": attacks,
        "title": title,
        "code": [code_hash(registry.load("attacks", table.name)) for table in config.attack],
        "named": hash_of_references(reference for _, reference in references_in(settings)),
        "weights": hash_of(weights) if weights is not None and weights.is_file() else None,
    }


def _data(config: Config) -> str:
    """Hash of the files that the data set reads, or of its examples, where it comes in no file that fedsim knows of.

    Raises:
        DataError: a file is missing or cannot be read.
        PluginError: the data set ended the program.
    """
    return _data_in(config.data.model_dump_json(), data_folder())


@cache
def _data_in(table: str, home: Path | None) -> str:
    """The same for a [data] table, which all cells of a plan may share."""
    config = Config(data=json.loads(table))
    try:
        files = files_of(registry.build("datasets", config.data.name, config.data.settings, "data"), home)
        if not files:
            return hash_of_dataset(Experiment(config).dataset)
        return hash_of_files(files, home)
    except OSError as error:
        raise DataError(f"data: {error.filename}: cannot be read ({error.strerror})") from error
    except SystemExit as error:
        raise PluginError(f"a plug-in ended the program ({what_it_said(error)})") from error
