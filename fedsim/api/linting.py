"""Look for pitfalls of an evaluation before it is run: `fedsim.lint`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.api.arguments import check_changes, copy_tables
from fedsim.api.objects import name_objects, replace_objects
from fedsim.base.errors import FedsimError
from fedsim.federation.app_file import AppFile, is_app_file
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import config_of, read_toml, set_value
from fedsim.federation.resolve import resolve
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust, is_in_run_folder
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.pitfalls.find import find_pitfalls
from fedsim.pitfalls.pitfall import Pitfall
from fedsim.plugins.allowed_code import allow_code
from fedsim.sweeps.file import parse_sweep, read_sweep

log = logging.getLogger(__name__)
_MAX_LINES = 3
"""Largest number of lines about pitfalls that a run or a sweep prints."""


def lint(
    experiment: str | Path | Mapping[str, Any] | Config,
    *,
    set: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> list[Pitfall]:
    """Find the pitfalls of an evaluation that an experiment, attack or sweep file has.

    One that could not be looked for, such as where its data are not on this machine, is listed too,
    with `was_tried = False`.

    Args:
        experiment: a file, its tables as a dict, or a `Config`; see `fedsim.run`.
        set: settings to change, such as `{"federation.rounds": 3}`.
        trust: import code that a file in a run folder names.

    Raises:
        FedsimError: the file is not valid.

    >>> import fedsim
    >>> tables = {"attack": [{"name": "sme"}], "defense": [{"name": "update-noise"}]}
    >>> fedsim.lint(tables)[0].title
    'a defense that hides nothing, such as noise of multiplier 0'
    """
    changes = check_changes({} if set is None else set)
    if isinstance(experiment, str | Path):
        return lint_file(Path(experiment), changes, trust=trust)
    if isinstance(experiment, Config):
        tables: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    else:
        tables = copy_tables(experiment)
    if "sweep" in tables:
        name_objects(tables)
        file = parse_sweep(tables, "sweep", Path.cwd(), changes=changes)
        return find_pitfalls(EvaluationDesign.of_sweep(file, trust=True))
    for key, value in changes:
        set_value(tables, key, value, f"set {key}")
    replace_objects(tables)
    return find_pitfalls(EvaluationDesign(specs=[_read_spec(tables, "experiment", Path.cwd())]))


def lint_file(path: Path, changes: Iterable[tuple[str, Any]], *, trust: bool) -> list[Pitfall]:
    """Find the pitfalls of a file, see `lint`."""
    tables = read_toml(path)
    if "sweep" in tables:
        file = read_sweep(path, changes)
        return find_pitfalls(EvaluationDesign.of_sweep(file, trust=trust))
    for key, value in changes:
        set_value(tables, key, value, f"set {key}")
    is_own = not is_in_run_folder(path)
    if is_own:
        allow_code(tables)
    spec = _read_spec(tables, str(path), path.parent, trusted=trust or is_own)
    return find_pitfalls(EvaluationDesign(specs=[spec]))


def _read_spec(tables: dict[str, Any], where: str, folder: Path, *, trusted: bool = True) -> AttackFile:
    """Return an attack file where there are no other tables; else an experiment whose plug-ins take their settings."""
    is_attack_file = bool(tables) and not set(tables) - set(AttackFile.model_fields)
    if is_attack_file or is_app_file(tables):
        spec = validate_tables(AttackFile if is_attack_file else AppFile, tables, where)
        check_trust(spec, Path(where), trusted)
        return spec.attack_file if isinstance(spec, AppFile) else spec
    config = config_of(tables, where, folder)
    check_trust(config, Path(where), trusted)
    resolve(config)
    return config


def log_pitfalls(pitfalls: Sequence[Pitfall], file: Path) -> None:
    """Say at level info which pitfalls a file has, in a few lines."""
    titles = [pitfall.title for pitfall in pitfalls[:_MAX_LINES]]
    if not titles:
        return
    further = f"; {len(pitfalls) - _MAX_LINES} more" if len(pitfalls) > _MAX_LINES else ""
    for title in titles[:-1]:
        log.info("lint: %s", title)
    log.info("lint: %s%s; `fedsim lint %s` says more", titles[-1], further, file)


def log_pitfalls_of_file(path: Path, changes: Iterable[tuple[str, Any]], *, trust: bool) -> None:
    """Look for the pitfalls of a file that is about to be run, and log them.

    What makes the file invalid is left to the run, which reports it.
    """
    try:
        log_pitfalls(lint_file(path, changes, trust=trust), path)
    except FedsimError as error:
        log.debug("lint: %s", error)
