"""Cells of a sweep, each with a hash of its inputs by which its results are found again.

A cell is one attack on one federation, and all cells of a federation share its recording. A hash
covers settings, code of other packages and of a checkout of fedsim, the data, the files that settings
name, and the versions of packages. Labels are left out, and so is where and how a federation runs, as
its engine does not change its messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedsim.audit.plan import work_stages
from fedsim.audit.score_reuse import hash_scoring_code
from fedsim.audit.threat_model import parse_device
from fedsim.base.content_hashes import hash_files, hash_json
from fedsim.base.errors import ConfigError, DataError, PluginError, error_reason
from fedsim.data import Dataset
from fedsim.data.cache import find_source_files
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.defense_limits import describe_defense_limits, find_open_rounds
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import config_of
from fedsim.federation.resolve import resolve
from fedsim.federation.settings import LAUNCH, hash_experiment_code, hash_named_files, versions
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust
from fedsim.interfaces.attack import BASELINE_SOURCES
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import find_references
from fedsim.plugins.code_hashes import hash_own_checkout, hash_plugin_code, hash_referenced_code
from fedsim.sweeps.file import SERIAL
from fedsim.sweeps.grid import GridPoint, SweepGrid
from fedsim.sweeps.table import SCORES

_KEY_LENGTH = 16
"""Hexadecimal digits of a key."""


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One attack on one federation.

    Attributes:
        config: its experiment, with every setting written out, as its run folder holds it.
        title: title of its attack there; other attacks are those that it builds on.
        defense_limits: sentences on what scores do not say of its defenses, see `describe_defense_limits`.
        open_rounds: in which a defense of its does not act.
        federation: hash of the inputs of its federation.
        key: hash of the inputs of its findings and scores.
    """

    point: GridPoint
    config: Config
    title: str
    defense_limits: str = ""
    open_rounds: Sequence[int] = ()
    federation: str = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        federation = federation_key(self.config)
        object.__setattr__(self, "federation", federation)
        attack_inputs = _attack_inputs(self.config, self.title)
        object.__setattr__(self, "key", _make_key({"federation": federation} | attack_inputs))

    @property
    def is_baseline(self) -> bool:
        """Return whether its attack is only a baseline.

        Such an attack reads a model as it was sent, or one that only the evaluator has.
        """
        return self.config.attack[-1].settings.get("source") in BASELINE_SOURCES

    @property
    def federation_config(self) -> Config:
        """Return the experiment of its federation, without attacks."""
        return self.config.model_copy(update={"attack": [], "adversary": AdversaryTable(when="never")})


@dataclass(frozen=True)
class InvalidPoint:
    """Grid point whose settings contradict one another, with the reason."""

    point: GridPoint
    reason: str


def federation_key(config: Config) -> str:
    """Hash the inputs of a federation, of which its recording and its accuracy are functions.

    Args:
        config: experiment with every setting written out, as by `resolve`.
    """
    return _make_key(_federation_inputs(config))


def build_cells(grid: SweepGrid, *, trust: bool) -> list[SweepCell | InvalidPoint]:
    """Build the cell at each point of `grid`, or say why it is invalid.

    A value of an axis that makes all of its cells invalid is an error; one that suits some cells is
    not.
    """
    _cached_data_hash.cache_clear()  # files may have changed since
    cells: list[SweepCell | InvalidPoint] = []
    for point in grid.points:
        try:
            cells.append(build_cell(grid, point, trust=trust))
        except ConfigError as error:
            cells.append(InvalidPoint(point, str(error)))
    _check_values(cells, grid.file.where)
    _check_distinct([cell for cell in cells if isinstance(cell, SweepCell)], grid.file.where)
    return cells


def _check_values(cells: Sequence[SweepCell | InvalidPoint], where: str) -> None:
    """Raise ConfigError where a value of an axis makes every cell invalid."""
    valid_values: set[tuple[str, Any]] = set()
    for cell in cells:
        if isinstance(cell, SweepCell):
            valid_values.update(cell.point.row.items())
    for cell in cells:
        if isinstance(cell, InvalidPoint) and not valid_values.issuperset(cell.point.row.items()):
            reason = cell.reason.removeprefix(f"{where}: ")
            raise ConfigError(f"{where}: {reason}; so it is in the cell {cell.point.name}")


def _check_distinct(cells: Sequence[SweepCell], where: str) -> None:
    cells_by_key: dict[str, SweepCell] = {}
    for cell in cells:
        first = cells_by_key.setdefault(cell.key, cell)
        if first is not cell:
            raise ConfigError(
                f"{where}: these two cells have the same settings: {first.point.name}; and "
                f"{cell.point.name}; leave a value out, or exclude one of them with "
                "[[sweep.exclude]]"
            )


def build_cell(grid: SweepGrid, point: GridPoint, *, trust: bool) -> SweepCell:
    """Build the cell at a point of `grid`."""
    tables, where = grid.tables(point), grid.file.where
    attack = tables["attack"][0]
    tables["attack"] = _add_source_attacks(attack, grid.attacks, where)
    config = config_of(tables, where, grid.file.folder)
    check_trust(config, Path(grid.file.where), trust or grid.file.is_own)
    config = resolve(_restrict_to_one_core(config))
    experiment = Experiment(config)
    _check_settings(experiment)
    rounds = range(1, config.federation.rounds + 1)
    return SweepCell(
        point=point,
        config=config,
        title=config.attack[-1].title,
        defense_limits=" ".join(describe_defense_limits(experiment.defenses, rounds)),
        open_rounds=find_open_rounds(experiment.defenses, rounds),
    )


def _check_settings(experiment: Experiment) -> None:
    """Raise ConfigError where settings are invalid whatever the data are."""
    # Build each part, for its errors alone.
    _ = experiment.training
    experiment.new_strategy()
    _ = experiment.defenses, experiment.measures
    attacks = build_attacks(experiment.config)
    work_stages({table.title: attack.builds_on for table, attack in attacks}, has_optima=True)


def _add_source_attacks(
    attack: Mapping[str, Any], known: Sequence[Mapping[str, Any]], where: str
) -> list[dict[str, Any]]:
    """Return the tables of the attacks that `attack` builds on, and its own.

    A single attack loses its label, which does not change its results.
    """
    tables = [dict(attack)]
    while (title := _builds_on(tables[0], where)) is not None:
        sources = [dict(table) for table in known if title in (table.get("label"), table.get("name"))]
        if not sources or sources[0] in tables:  # `work_stages` reports the error
            break
        tables = [*sources, *tables]
    if len(tables) == 1:
        tables[0].pop("label", None)
    return tables


def _builds_on(table: Mapping[str, Any], where: str) -> str | None:
    [(_, attack)] = build_attacks(validate_tables(AttackFile, {"attack": [dict(table)]}, where))
    return attack.builds_on


def _restrict_to_one_core(config: Config) -> Config:
    """Return the experiment as it runs in a sweep: on one core, without processes of its own."""
    federation = config.federation.model_dump(exclude=set(SERIAL), exclude_none=True)
    adversary = config.adversary.model_copy(update={"when": "at-end", "workers": 1})
    return config.model_copy(update={"federation": type(config.federation)(**federation), "adversary": adversary})


def _make_key(inputs: Mapping[str, Any]) -> str:
    return hash_json(inputs)[:_KEY_LENGTH]


def _federation_inputs(config: Config) -> dict[str, Any]:
    tables = config.model_dump(mode="json", exclude_none=True, exclude=set(AttackFile.model_fields))
    for key in LAUNCH:
        if key != "evaluate_every":
            tables["federation"].pop(key, None)
    tables["recording"].pop("fsync")
    return {
        "experiment": tables,
        "code": hash_experiment_code(config),
        "data": _hash_data(config),
        "files": hash_named_files(config),
        "versions": versions(),
        "fedsim": hash_own_checkout(),
    }


def _attack_inputs(config: Config, title: str) -> dict[str, Any]:
    """Return the further inputs of findings and scores."""
    adversary = config.adversary.model_dump(mode="json", exclude_none=True, exclude={"when", "workers"})
    attacks = [table.model_dump(mode="json", exclude_none=True) for table in config.attack]
    settings = [adversary, *({**table, "name": None} for table in attacks)]
    return {
        "adversary": adversary | {"device": str(parse_device(config.adversary.device))},
        "attack": attacks,
        "title": title,
        "code": [hash_plugin_code(registry.load("attacks", table.name)) for table in config.attack],
        "named": hash_referenced_code(reference for _, reference in find_references(settings)),
        **hash_scoring_code(),
        "columns": SCORES,
    }


def _hash_data(config: Config) -> str:
    """Hash the files that the data set reads, or its examples where fedsim knows no such files."""
    return _cached_data_hash(config.data.model_dump_json(), find_data_folder())


@cache
def _cached_data_hash(table: str, folder: Path | None) -> str:
    """Compute the same hash for a [data] table, which all cells of a plan may share."""
    config = Config(data=json.loads(table))
    try:
        files = find_source_files(registry.build("datasets", config.data.name, config.data.settings, "data"), folder)
        if not files:
            return _hash_dataset(Experiment(config).dataset)
        return hash_files(files, folder)
    except OSError as error:
        raise DataError(f"data: {error.filename}: cannot be read ({error.strerror})") from error
    except SystemExit as error:
        raise PluginError(f"a plug-in ended the program ({error_reason(error)})") from error


def _hash_dataset(dataset: Dataset) -> str:
    """Return the SHA-256 of all examples and of the other fields of a data set."""
    parts = {"train": dataset.train, "test": dataset.test}
    names = [field.name for field in fields(dataset) if field.name not in parts]
    values = [(name, getattr(dataset, name)) for name in names]
    digest = hashlib.sha256(repr(values).encode())
    for part in parts.values():
        digest.update(repr(part.scale).encode())
        for tensor in (part.raw, part.labels, part.groups):
            digest.update(b"none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor is not None and tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
