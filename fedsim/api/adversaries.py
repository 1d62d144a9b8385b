"""Adversary of a recorded run, read from a file; importing this is quick, so that mistakes are reported at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.federation.app_file import RUN_TABLES, AppFile, flatten_run_config
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust, is_in_run_folder
from fedsim.plugins.allowed_code import allow_code


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Adversary of a recorded run.

    Attributes:
        spec: which clients to attack with which attacks; None for what the run's own experiment says.
        beside: folder in which the `module:callable` and the truth files of `spec` are found.
    """

    spec: AttackFile | None = None
    beside: Path | None = None
    command: str = "fedsim attack RUN"


def read_adversary(
    folder: OpenRun, file: Path | None, overrides: Iterable[str] = (), *, trust: bool = False
) -> Adversary:
    """Read the adversary that `file` describes; without a file, the one that the run describes.

    Args:
        overrides: `key=value` settings of that file, or of the run's own experiment.
        trust: accept `module:callable` in a file that is in a run folder.
    """
    overrides = list(overrides)
    recording_tables = set(Config.model_fields) - set(AttackFile.model_fields)
    for override in overrides:
        table = override.partition(".")[0]
        if table in recording_tables:
            raise ConfigError(f"--set {override}: the recording was made with [{table}] as it was, so leave that out")
    if file is None and not overrides:
        return Adversary()
    source = file if file is not None else folder.experiment
    tables = read_toml(source, overrides)
    if folder.app.is_file():
        _check_app_tables(folder, tables, source)
        tables = {key: table for key, table in tables.items() if key not in RUN_TABLES}
    kind = Config if set(tables) - set(AttackFile.model_fields) else AttackFile
    spec: AttackFile = validate_tables(kind, tables, str(source))
    is_outside = not is_in_run_folder(source, folder.path)
    if is_outside:
        allow_code(tables)
    check_trust(spec, source, trust or is_outside)
    if file is not None and isinstance(spec, Config):
        _check_same_run(spec, file, folder)
    command = ["fedsim", "attack", "RUN", *([file.name] if file is not None else []), *override_options(overrides)]
    return Adversary(spec=spec, beside=source.parent, command=shlex.join(command))


def _check_app_tables(run: OpenRun, tables: dict[str, Any], file: Path) -> None:
    """Raise ConfigError where a file says that the app of a run was run otherwise."""
    made = read_toml(run.app)
    spec = validate_tables(AppFile, {key: tables[key] for key in RUN_TABLES if key in tables}, str(file))
    stated = spec.model_dump(mode="json", exclude_none=True, include=set(RUN_TABLES) & set(tables))
    if "run_config" in stated:
        stated["run_config"] = flatten_run_config(stated["run_config"])
        made["run_config"] = {key: made.get("run_config", {}).get(key) for key in stated["run_config"]}
    for key, table in stated.items():
        if table != made.get(key, [] if key == "defense" else None):
            raise ConfigError(
                f"{file}: {key}: the app was run with {made.get(key, 'none')}, and this file says {table}; run it "
                "again with `fedsim run --app`, or leave the table out"
            )


def _check_same_run(spec: Config, file: Path, run: OpenRun) -> None:
    """Raise ConfigError where a whole experiment file, given as attack file, is that of another run."""
    if differing_setting := run.find_changed_setting(resolve(spec)):
        key, old, new = differing_setting
        raise ConfigError(
            f"{file}: {key}: the run was made with {old}, this file says {new}; give one with [adversary] and "
            "[[attack]] alone"
        )


def override_options(overrides: Iterable[str]) -> list[str]:
    """Return the overrides as options of a command, with paths on this machine cut to their last part."""
    options: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        options += ["--set", f"{key}={Path(value).name if Path(value).is_absolute() else value}"]
    return options
