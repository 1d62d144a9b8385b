"""What a run was made with: its settings, by `table.key`, and the versions of what computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fedsim.experiments.config import Config

_VERSIONED = ("fedsim-curious", "torch", "flwr", "ray", "safetensors", "torchmetrics", "numpy", "scipy")
_INFLUENCES = ("data", "partition", "model", "training", "federation", "strategy", "defense", "states")
"""The tables of an experiment that a training follows from."""
_LAUNCH = ("engine", "timeout", "actors", "address", "gpus_per_actor", "supernodes", "port", "evaluate_every")
"""The keys of [federation] that it does not follow from."""
MAY_CHANGE = ("adversary.", "attack.", "states.", "recording.fsync", *(f"federation.{key}" for key in _LAUNCH))
"""Settings that may change before a run goes on."""


def made_with(config: Config) -> dict[str, Any]:
    """What determines the states of a training: the settings that influence them, and the versions."""
    tables = config.model_dump(mode="json", exclude_none=True, exclude={"federation": set(_LAUNCH)})
    tables = {key: tables[key] for key in _INFLUENCES}
    tables["states"].pop("epochs", None)  # further epochs do not change the earlier ones
    return {"experiment": tables, "versions": versions()}


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by `table.key`, as it would be read from the experiment file again."""
    found: dict[str, Any] = {}
    for name, table in json.loads(config.model_dump_json(exclude_none=True)).items():
        rows = {f"{name}.{row.get('label') or row['name']}": row for row in table} if name == "attack" else {}
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
