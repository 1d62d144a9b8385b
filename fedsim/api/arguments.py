"""Read what a caller passes in Python: paths, tables and changes of settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.federation.config import Config
from fedsim.federation.experiment_file import read_toml
from fedsim.plugins.frozen import to_plain_value


def read_tables(experiment: str | Path | Mapping[str, Any] | Config) -> tuple[dict[str, Any], str, Path]:
    """Return the tables of an experiment, their name in messages, and the folder to which paths are relative."""
    if isinstance(experiment, str | Path):
        path = Path(experiment)
        return read_toml(path), str(path), path.parent
    if isinstance(experiment, Config):
        return experiment.model_dump(mode="json", exclude_none=True), "experiment", Path.cwd()
    if isinstance(experiment, Mapping):
        return copy_tables(experiment), "experiment", Path.cwd()
    raise ConfigError(f"experiment: expected a path, a dict or a Config, got {type(experiment).__name__}")


def check_changes(changes: object) -> list[tuple[str, Any]]:
    """Return settings to change as pairs of key and value."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"set: expected a dict of settings, got {type(changes).__name__}")
    for key in changes:
        if not isinstance(key, str) or not all(word.strip() for word in key.split(".")):
            raise ConfigError(f"set: expected keys such as 'federation.rounds', got {key!r}")
    return [(key, copy_tables(value)) for key, value in changes.items()]


def copy_tables(value: Any) -> Any:
    """Copy tables and lists, so that those of the caller do not change; paths become texts, objects are not copied."""
    if isinstance(value, Mapping):
        return {str(key): copy_tables(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copy_tables(inner) for inner in value]
    return to_plain_value(value)


def as_path(value: object, argument: str) -> Path:
    """Return a path; raise ConfigError where `value` is none."""
    if not isinstance(value, str | Path):
        raise ConfigError(f"{argument}: expected a path, got {type(value).__name__}")
    return Path(value)
