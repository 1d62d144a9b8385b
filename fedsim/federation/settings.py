"""Describe how a run was made: settings by `table.key`, code of plug-ins, versions of packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.base.content_hashes import cached_file_hash, hash_folder
from fedsim.base.errors import ConfigError
from fedsim.federation.config import Config
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.experiment_file import PATHS
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import find_references
from fedsim.plugins.code_hashes import hash_plugin_code, hash_referenced_code
from fedsim.plugins.inline import is_object

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment

_PACKAGES = (
    "fedsim-curious",
    "torch",
    "flwr",
    "ray",
    "safetensors",
    "numpy",
    "scipy",
)
_TRAINING_TABLES = (
    "data", "partition", "model", "training", "federation", "strategy", "algorithm", "defense", "secure_aggregation",
    "central_privacy", "distributed_privacy", "canaries", "states",
)  # fmt: skip
"""Tables of an experiment that determine the training."""
LAUNCH = (
    "engine",
    "timeout",
    "actors",
    "address",
    "gpus_per_actor",
    "supernodes",
    "reply_memory",
    "evaluate_every",
)
"""Keys of [federation] that do not determine the training."""
REBUILT = ("data", "partition", "model")
"""Tables from which a run is rebuilt for attacks on it."""
MAY_CHANGE = (
    "adversary.", "attack.", "report.", "states.", "recording.fsync", "canaries.confidence",
    *(f"federation.{key}" for key in LAUNCH),
)  # fmt: skip
"""Prefixes of settings that may change before a run is resumed."""


def training_fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Return what determines the states of a training: settings, code, data and versions."""
    config = experiment.config
    tables = config.model_dump(mode="json", exclude_none=True, exclude={"federation": set(LAUNCH)})
    tables = {key: tables[key] for key in _TRAINING_TABLES if key in tables}
    tables["states"].pop("epochs", None)  # further epochs do not change the earlier ones
    if code := hash_experiment_code(config):
        tables["code"] = code
    tables["contents"] = {"data": experiment.data.sha256, **hash_named_files(config)}
    return {"experiment": tables, "versions": versions()}


def hash_named_files(config: Config) -> dict[str, str]:
    """Hash the files and folders that settings of partition and model name."""
    hashes: dict[str, str] = {}
    for name in ("partition", "model"):
        for key, value in getattr(config, name).model_dump(mode="json").items():
            if key not in PATHS or not isinstance(value, str) or not value:
                continue
            path = (find_data_folder() or Path()) / Path(value).expanduser()
            try:
                hashes[f"{name}.{key}"] = hash_folder(path) if path.is_dir() else cached_file_hash(path)
            except OSError as error:
                raise ConfigError(f"{name}.{key}: {path}: cannot be read ({error.strerror})") from error
    return hashes


def hash_experiment_code(config: Config) -> dict[str, str]:
    """Hash the code of each plug-in that another package registers or the experiment names.

    Code that a setting of a plug-in names, such as the measure of a gate, counts as well. Objects
    of a Python program are left out: a run that was made with one can only be resumed by that
    program.

    Returns:
        Hashes by position in the file, such as `model` or `defense.0`.
    """
    parts = config.plugins
    # Load all plug-ins of other packages before any is hashed.
    foreign_plugins: dict[str, Any] = {}
    for where, (group, name) in parts.items():
        if not is_object(name) and not registry.is_builtin(group, name):
            foreign_plugins[where] = registry.load(group, name)
    hashes = {where: hash_plugin_code(plugin) for where, plugin in foreign_plugins.items()}
    # Add code that settings name, by the path of the setting.
    # What attacks, and what carries messages, changes no message.
    excluded: Any = {"attack": True, "adversary": True, "federation": {"engine"}}
    tables = config.model_dump(mode="json", exclude_none=True, exclude=excluded)
    plugin_names = {name for _, name in parts.values()}
    named = [pair for pair in find_references(tables) if pair[1] not in plugin_names]
    for path, references in groupby(sorted(named), key=itemgetter(0)):
        hashes[".".join(path)] = hash_referenced_code(reference for _, reference in references)
    return {where: code for where, code in hashes.items() if code is not None}


def flat_settings(config: Config) -> dict[str, Any]:
    """Return every setting by `table.key`, as it would be read from the experiment file again."""
    settings: dict[str, Any] = {}
    for name, value in json.loads(config.model_dump_json(exclude_none=True)).items():
        tables: dict[str, Any] = {}
        if not isinstance(value, list):
            tables[name] = value
        elif name == "defense":
            tables = {f"{name}.{number}": table for number, table in enumerate(value)}
        elif name in ("attack", "measure"):
            tables = {f"{name}.{table.get('label') or table['name']}": table for table in value}
        for prefix, table in tables.items():
            settings |= {f"{prefix}.{key}": setting for key, setting in table.items()}
    return settings


def flatten_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which each value of a table stands under its own key.

    >>> flatten_tables({"adversary.who": "server", "adversary.knowledge": {"labels": True}})
    {'adversary.who': 'server', 'adversary.knowledge.labels': True}
    """
    flat = dict[str, Any]()
    for key, value in settings.items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with their old and new values; None where they are not set.

    >>> changed_settings({"a.x": 1, "a.y": 2}, {"a.x": 1, "b.z": 3})
    {'a.y': (2, None), 'b.z': (None, 3)}
    """
    pairs = {key: (before.get(key), now.get(key)) for key in (*before, *now)}
    return {key: (old, new) for key, (old, new) in pairs.items() if json.dumps(old) != json.dumps(new)}


def versions() -> dict[str, str]:
    """Return the versions of fedsim and of the packages that it computes with."""
    return {name: _version(name) for name in _PACKAGES}


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
