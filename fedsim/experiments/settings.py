"""What a run was made with: its settings, by `table.key`, the code of plug-ins, and the versions of packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.content_hashes import hash_of, hash_of_folder
from fedsim.errors import ConfigError
from fedsim.experiments.config import Config
from fedsim.experiments.reading import PATHS
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import references_in
from fedsim.plugins.code import code_hash, hash_of_references
from fedsim.plugins.objects import is_object

if TYPE_CHECKING:
    from fedsim.experiments.build import Experiment

_VERSIONED = ("fedsim-curious", "torch", "flwr", "ray", "safetensors", "torchmetrics", "numpy", "scipy")
_INFLUENCES = (
    "data", "partition", "model", "training", "federation", "strategy", "defense", "secure_aggregation", "canaries",
    "states",
)  # fmt: skip
"""The tables of an experiment that a training follows from."""
LAUNCH = ("engine", "timeout", "actors", "address", "gpus_per_actor", "supernodes", "reply_memory", "evaluate_every")
"""The keys of [federation] that it does not follow from."""
REBUILT = ("data", "partition", "model")
"""The tables from which a run is rebuilt for attacks on it; its training follows from others too."""
MAY_CHANGE = (
    "adversary.", "attack.", "report.", "states.", "recording.fsync", "canaries.confidence",
    *(f"federation.{key}" for key in LAUNCH),
)  # fmt: skip
"""Settings that may change before a run goes on."""


def made_with(experiment: Experiment) -> dict[str, Any]:
    """What determines the states of a training: settings, code and data that influence them, and the versions."""
    config = experiment.config
    tables = config.model_dump(mode="json", exclude_none=True, exclude={"federation": set(LAUNCH)})
    tables = {key: tables[key] for key in _INFLUENCES if key in tables}
    tables["states"].pop("epochs", None)  # further epochs do not change the earlier ones
    if code := code_of(config):
        tables["code"] = code
    tables["contents"] = {"data": experiment.data.sha256, **hashes_of_files(config)}
    return {"experiment": tables, "versions": versions()}


def hashes_of_files(config: Config) -> dict[str, str]:
    """Hashes of the files and folders that settings of partition and model name.

    Raises:
        ConfigError: one cannot be read.
    """
    from fedsim.experiments.build import data_folder  # which takes torch

    found = {}
    for name in ("partition", "model"):
        for key, value in getattr(config, name).model_dump(mode="json").items():
            if key not in PATHS or not isinstance(value, str) or not value:
                continue
            path = (data_folder() or Path()) / Path(value).expanduser()
            try:
                found[f"{name}.{key}"] = hash_of_folder(path) if path.is_dir() else hash_of(path)
            except OSError as error:
                raise ConfigError(f"{name}.{key}: {path}: cannot be read ({error.strerror})") from error
    return found


def code_of(config: Config) -> dict[str, str]:
    """The hash of the code of each part of the federation that another package registers, or the experiment names.

    Code that a setting of a part names, such as the measure of a gate, counts as well.

    Objects of a Python program are not among them: a run that was made with one can only be resumed by that program.

    Returns:
        By place in the file, such as `model` or `defense.0`.

    Raises:
        PluginError: one does not import.
    """
    parts: dict[str, tuple[registry.Group, str]] = {
        "data": ("datasets", config.data.name),
        "partition": ("partitions", config.partition.name),
        "model": ("models", config.model.name),
        "strategy": ("strategies", config.strategy.name),
    }
    parts |= {f"defense.{place}": ("defenses", table.name) for place, table in enumerate(config.defense)}
    parts |= {f"measure.{table.title}": ("measures", table.name) for table in config.measure}
    others = {
        where: registry.load(group, name)
        for where, (group, name) in parts.items()
        if not is_object(name) and not registry.is_own(group, name)
    }
    found = {where: code_hash(plugin) for where, plugin in others.items()}
    tables = config.model_dump(mode="json", exclude_none=True, exclude={"attack", "adversary"})
    named = (pair for pair in references_in(tables) if pair[1] not in {name for _, name in parts.values()})
    for place, references in groupby(sorted(named), key=itemgetter(0)):
        found[".".join(place)] = hash_of_references(reference for _, reference in references)
    return {where: code for where, code in found.items() if code is not None}


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by `table.key`, as it would be read from the experiment file again."""
    found: dict[str, Any] = {}
    for name, table in json.loads(config.model_dump_json(exclude_none=True)).items():
        titled = table if name in ("attack", "measure") else ()
        rows = {f"{name}.{row.get('label') or row['name']}": row for row in titled}
        rows |= {f"{name}.{place}": row for place, row in enumerate(table)} if name == "defense" else {}
        for prefix, row in (rows if isinstance(table, list) else {name: table}).items():
            found |= {f"{prefix}.{key}": value for key, value in row.items()}
    return found


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that are not the same, with what they were and what they are; None where they are not set."""
    pairs = {key: (before.get(key), now.get(key)) for key in (*before, *now)}
    return {key: (a, b) for key, (a, b) in pairs.items() if json.dumps(a) != json.dumps(b)}


def versions() -> dict[str, str]:
    """Of fedsim and of the packages that it computes with."""
    return {name: _version(name) for name in _VERSIONED}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
