"""Run a Flower app under a curious server: record, attack and report; see `fedsim.federation.app_run`."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.api import pipeline
from fedsim.api.adversaries import Adversary, override_options
from fedsim.api.arguments import check_changes
from fedsim.api.logs import log_to_file
from fedsim.api.runs import Run, follow_with, raise_failures
from fedsim.audit.plan import ReportJobProgress
from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import AttackCrash, ConfigError, RunError, join_first
from fedsim.base.files import write_text
from fedsim.base.progress import ProgressListener, listen_to_progress
from fedsim.base.randomness import serialize_calls
from fedsim.base.workers import run_in_processes
from fedsim.federation.app_file import RUN_TABLES, AppFile, RunConfig
from fedsim.federation.app_run import AppJob, app_runner, build_app_defenses
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.experiment_file import check_possible, read_toml, set_value
from fedsim.federation.flower_app import FlowerApp, read_app
from fedsim.federation.open_run import OpenRun
from fedsim.federation.settings import versions
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust, is_in_run_folder
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import allow_code, find_references
from fedsim.plugins.code_hashes import hash_own_checkout, hash_plugin_code, hash_referenced_code
from fedsim.plugins.inline import is_object
from fedsim.recording.clear_text import find_clear_texts
from fedsim.recording.messages import MESSAGES_FOLDER, read_messages

log = logging.getLogger(__name__)
_MAX_NAMES = 4
"""Most values that one sentence names."""


@dataclass(frozen=True, kw_only=True)
class AppRequest:
    """Run of an app that was asked for, with its settings checked.

    Attributes:
        file: how it is run and attacked.
    """

    app: FlowerApp
    run_config: RunConfig
    file: AppFile
    beside: Path
    command: str = "fedsim attack RUN FILE"

    @property
    def adversary(self) -> Adversary:
        """Return who attacks the run, with the settings that were changed."""
        return Adversary(spec=self.file.attack_file, beside=self.beside, command=self.command)

    def describe(self, *, is_complete: bool) -> dict[str, Any]:
        """Return what `app.toml` in the run folder says: of which app the run is, and how it was run."""
        tables = self.file.model_dump(mode="json", exclude_none=True, include=set(RUN_TABLES))
        return {
            "app": {
                "name": self.app.name,
                **self.app.components,
                "code": self.app.hash_code(),
                "flwr": version("flwr"),
                "made_by": self._hash_makers(),
                "complete": is_complete,
            },
            **{key: table for key, table in tables.items() if table != []},
            "run_config": self.run_config,
        }

    def _hash_makers(self) -> str:
        """Return the SHA-256 of the code around the app, and of its versions: a run of others is another run."""
        names = [table.name for table in self.file.defense]
        foreign = [name for name in names if not is_object(name) and not registry.is_builtin("defenses", name)]
        plugins = [hash_plugin_code(registry.load("defenses", name)) for name in foreign]
        settings = [table.model_dump(mode="json") for table in self.file.defense]
        named = sorted({reference for _, reference in find_references(settings)} - set(names))
        return hash_json([plugins, hash_referenced_code(named), versions(), hash_own_checkout()])


@serialize_calls
def run_app(
    folder: str | Path,
    file: str | Path | None = None,
    out: str | Path | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    trust: bool = False,
    progress: ProgressListener | None = None,
) -> Run:
    """Run a Flower app over clients in one process, record what its server sees, attack that, and report.

    Flower's simulation engine is not needed. The app runs in a separate process, in the present working folder.

    Args:
        folder: of the app, with a pyproject.toml that names its serverapp and its clientapp, as for `flwr run`.
        file: an attack file, which may also say how the app is run: `[federation]` `clients` and `seed`,
            `[run_config]`, `[[defense]]`, `[secure_aggregation]`. Without one nothing is attacked.
        out: the run folder; by default `runs/NAME` for an app in a folder `NAME`.
        set: settings to change, such as `{"federation.clients": 5, "run_config.num-server-rounds": 3}`.
        overwrite: replace an earlier run in the folder.
        trust: import the app's code even if it is in a run folder, and code that a file there names.
        progress: called as `progress(what, done, total)`.

    Raises:
        FedsimError: the request is not valid, and nothing was started; or the app or an attack failed, and everything
            that was recorded and computed before is kept in the folder.
    """
    changes = check_changes({} if set is None else set)
    path = None if file is None else Path(file)
    request = read_request(Path(folder), path, changes, trust=trust)
    run_folder = OpenRun(default_app_folder(request.app) if out is None else Path(out))
    with listen_to_progress(progress):
        done = run_request(request, run_folder, overwrite=overwrite, trust=trust, follow=follow_with(progress))
    raise_failures(done)
    return Run(run_folder.path, adversary=request.adversary, trust=trust)


def default_app_folder(app: FlowerApp) -> Path:
    """Return `runs/NAME` for an app in a folder `NAME`."""
    return Path("runs") / app.folder.name


def read_request(folder: Path, file: Path | None, changes: Iterable[tuple[str, Any]], *, trust: bool) -> AppRequest:
    """Read an app and the file that says how it is run and attacked; import no code of the app."""
    changes = list(changes)
    tables, where = ({}, "settings") if file is None else (read_toml(file), str(file))
    command = ["fedsim", "attack", "RUN", "FILE" if file is None else file.name]
    for key, value in changes:
        set_value(tables, key, value, f"set {key}")
        if key.partition(".")[0] not in RUN_TABLES:
            command += override_options([f"{key}={value}"])
    app = read_app(folder, trust=trust)
    request = parse_request(app, tables, where, Path.cwd() if file is None else file.parent, trust=trust, path=file)
    return replace(request, command=shlex.join(command))


def parse_request(
    app: FlowerApp, tables: dict[str, Any], where: str, beside: Path, *, trust: bool, path: Path | None
) -> AppRequest:
    """Check the tables that say how an app is run and attacked, see `read_request`."""
    check_possible(tables, where)
    spec = validate_tables(AppFile, tables, where)
    is_own = path is None or not is_in_run_folder(path)
    if is_own:
        allow_code(tables)
    check_trust(spec, Path(where), trust or is_own)
    # Report what is wrong before the app runs, which may take hours.
    run_config = app.merge_config(spec.run_config)
    build_app_defenses(spec)
    build_attacks(spec)
    if spec.adversary.knowledge.defenses is True and not spec.defense:
        raise ConfigError(
            f"{where}: adversary.knowledge.defenses: fedsim puts no defense around the clients, and it is unknown "
            "what the app does itself; add a [[defense]], or leave the key out"
        )
    if spec.adversary.when == "in-round":
        raise ConfigError(f"{where}: adversary.when: 'in-round' is for experiments; an app is attacked at its end")
    return AppRequest(app=app, run_config=run_config, file=spec, beside=beside)


def run_request(
    request: AppRequest,
    folder: OpenRun,
    *,
    overwrite: bool,
    trust: bool,
    follow: ReportJobProgress | None,
) -> pipeline.AuditResult:
    """Run an app into a run folder, attack what was recorded, and report."""
    record_request(request, folder, overwrite=overwrite)
    return attack_request(request, folder, trust=trust, follow=follow)


def record_request(request: AppRequest, folder: OpenRun, *, overwrite: bool) -> None:
    """Run an app in a separate process, and record what its server sees."""
    with folder.hold_lock(), log_to_file(folder.log):
        folder.prepare(resume=False, overwrite=overwrite)
        _write_description(request, folder, is_complete=False)
        recording = folder.path.resolve() / "transcript"  # the app may change the working folder
        job = AppJob(app=request.app, run_config=request.run_config, file=request.file, recording=recording)
        for _, error in run_in_processes([job], 1, app_runner, (), lambda *progress: None):
            if isinstance(error, AttackCrash):  # of the process, not of an attack
                raise RunError(f"{request.app.folder}: the app's process failed: {error}") from error
            if error is not None:
                raise error
        folder.expire()  # the app's process wrote there
        _write_description(request, folder, is_complete=True)
        _warn_of_rows_in_clear(folder)


def _warn_of_rows_in_clear(folder: OpenRun) -> None:
    """Warn where clients send something about each of their examples beside their updates."""
    names: list[str] = []
    for clear_text in find_clear_texts(read_messages(folder.path / MESSAGES_FOLDER)):
        if clear_text.per_example:
            names.append(f"'{clear_text.name}'")
    if names:
        log.warning(
            "clients send %s in clear, with a row for each example, which the server reads without any attack; "
            "`fedsim inspect %s` lists all that they send in clear",
            join_first(names, _MAX_NAMES),
            folder.path,
        )


def _write_description(request: AppRequest, folder: OpenRun, *, is_complete: bool) -> None:
    write_text(folder.app, tomli_w.dumps(request.describe(is_complete=is_complete)))
    folder.manifest.note(folder.app)


def attack_request(
    request: AppRequest, folder: OpenRun, *, trust: bool, follow: ReportJobProgress | None = None
) -> pipeline.AuditResult:
    """Attack what was recorded of an app, if the file names attacks, and report."""
    if not request.file.attack or request.file.adversary.when == "never":
        return pipeline.report(folder, trust=trust)
    if str(request.app.folder) not in sys.path:
        sys.path.append(str(request.app.folder))  # the file may name the app's own model
    return pipeline.attack(folder, request.adversary, trust=trust, follow=follow)
