"""Run a federation: check the experiment, prepare its folder, start an engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedsim.base.environment import environment
from fedsim.base.errors import FedsimError, InstallationError, RunError, error_reason, join_first, plugin_exit_error
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.integrity import start_late_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.states import TrainingStates
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import locate_error
from fedsim.privacy.audit_power import describe_canaries
from fedsim.privacy.ledger import state_guarantee, unique_labels
from fedsim.recording.sealed_files import read_sealed_file
from fedsim.training.canaries import audited_hook

log = logging.getLogger(__name__)

_MAX_LISTED = 5
"""Most rounds that a sentence lists."""
_FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_LOG_LEVEL": "WARNING",
}


def run_federation(config: Config, folder: OpenRun, *, resume: bool = False, overwrite: bool = False) -> None:
    """Train for the rounds that `config` names, and record what the server sees into `folder`.

    Raises:
        ConfigError: the experiment is invalid; nothing was started.
        PluginError: a plug-in does not load, or ends the program; nothing was started.
        RunError: the federation cannot continue; what was recorded stays usable.
    """
    with quiet_flower():
        _run_federation(config, folder, resume=resume, overwrite=overwrite)


def _run_federation(config: Config, folder: OpenRun, *, resume: bool, overwrite: bool) -> None:
    registry.check_installation()
    server_app, client_app = load_app_part("server"), load_app_part("client")
    # Imported here, after `load_app_part` has explained a Flower that is not installed.
    from fedsim.federation.engines.engine import FederationJob, build_engine

    engine = build_engine(config.federation)
    try:
        config = resolve(config if resume else config.without_data_hash())
        experiment = folder.build_experiment(config)
        job = FederationJob(
            config=config,
            experiment=experiment,
            server_app=server_app,
            client_app=client_app,
            folder=folder.path,
            resume=resume,
        )
        experiment.check()
        engine.check(job)
        log_canary_power(experiment)
    except SystemExit as error:
        raise plugin_exit_error(error) from error
    with folder.hold_lock():
        prepare_run(config, folder, resume=resume, overwrite=overwrite)
        if resume and _is_finished(config, folder):
            log.info("the run is finished: all %d rounds are done already", config.federation.rounds)
            return
        try:
            engine.carry(job)
        except Exception as error:
            name = config.federation.engine_table.name
            if isinstance(error, FedsimError) or registry.is_builtin("engines", name):
                raise
            raise RunError(
                f"engine '{name}' raised {error_reason(error)} ({locate_error(error, type(engine))}); fix the engine, "
                "and resume the run"
            ) from error
        finally:
            folder.expire()  # the server app opened the folder for itself
        if not _is_finished(config, folder):
            raise RunError(
                f"engine '{config.federation.engine_table.name}' ended before round {config.federation.rounds} and "
                "gave no reason; fix the engine, and resume the run"
            )


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Disable Flower's telemetry and logging, here and in processes that are started meanwhile.

    Variables that the environment already sets take precedence; afterwards it is as before.
    """
    logger = logging.getLogger("flwr")
    level = logger.level
    with environment(_FLOWER_ENVIRONMENT, override=False) as added:
        if "FLWR_LOG_LEVEL" in added:  # Flower reads it when it is imported, which may be long ago
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)


def prepare_run(config: Config, folder: OpenRun, *, resume: bool, overwrite: bool = False) -> None:
    """Prepare `folder`, which is locked, for a new or a resumed run."""
    folder.prepare(resume=resume, overwrite=overwrite)
    if not resume:
        folder.write_experiment(config)
        return
    start_late_manifest(folder, folder.build_experiment(config))
    folder.check_key()
    folder.check_same(config)
    folder.check_code(config)
    folder.check_resumable()
    folder.note_experiment(config)
    last_round = _last_round(folder)
    passed = {f"round-{number}": number for number in config.states.rounds if number <= last_round}
    if missing := TrainingStates(folder.states).find_missing(passed):
        log.warning(
            "states.rounds: of round %s no state is saved, as it was over before the state was asked for; "
            "`fedsim train` makes it",
            join_first([passed[name] for name in missing], _MAX_LISTED),
        )


def _is_finished(config: Config, folder: OpenRun) -> bool:
    """Return whether nothing is left to train, so that no engine has to start."""
    return _last_round(folder) >= config.federation.rounds


def _last_round(folder: OpenRun) -> int:
    """Return the last round that is complete, -1 without any."""
    if not folder.checkpoint.is_file():
        return -1
    header, _ = read_sealed_file(folder.checkpoint)
    return int(header["round"])


def load_client_app() -> Any:
    """Return Flower's app of the clients, to let them train outside of a federation."""
    with quiet_flower():
        return load_app_part("client")


@cache
def load_app_part(name: str) -> Any:
    """Load a part of an app, such as one side, by entry point: the core imports no plug-in packages."""
    entries = [entry for entry in entry_points(group="fedsim.apps") if entry.name == name]
    if not entries:
        raise InstallationError(f"no {name} app is registered; install the project first ('pip install -e .')")
    try:
        return entries[0].load()
    except ImportError as error:
        registry.check_installation()  # an app may have a module that is called as one of fedsim's packages
        raise InstallationError(
            f"a federation needs Flower ({error}); pip install 'fedsim-curious[federation]'"
        ) from error


def log_canary_power(experiment: Experiment) -> None:
    """Log what the canaries of each kind of client can find of each defense; nothing without [canaries]."""
    table, central = experiment.config.canaries, experiment.central_privacy
    if table is None:
        return
    # Noise of the server protects all clients alike.
    if central is not None:
        rounds = experiment.config.federation.rounds
        asked_rounds = rounds if central.cycle is None else math.ceil(rounds / central.cycle)
        mechanisms, proved = [central.mechanism(asked_rounds)], central.epsilon(asked_rounds)
        sentence, finds = describe_canaries(mechanisms, table.count, proved, central.delta, table.confidence)
        if central.rate is not None or central.correlation == "tree":
            sentence += "; they show less here, since noise and sampling are accounted for as if each were seen alone"
        _log_power(central.name, sentence, finds)
        return
    # Otherwise each client has its own defenses, and the bounds share the confidence.
    labels = unique_labels([defense.name for defense in experiment.config.defense])
    clients = experiment.config.canary_clients
    audited = sum(bool(audited_hook(defense)) for defense in experiment.client_defenses(clients[0]))
    confidence = 1 - (1 - table.confidence) / max(1, audited * len(clients))
    said = set[str]()
    for client in clients:
        participation = experiment.setting.participation(client)
        for label, defense in zip(labels, experiment.client_defenses(client), strict=True):
            guarantee = state_guarantee(defense, [participation]) if audited_hook(defense) else None
            if guarantee is None:
                continue
            mechanism = defense.mechanism(participation)
            mechanisms = [] if mechanism is None else [mechanism]
            sentence, finds = describe_canaries(mechanisms, table.count, guarantee.epsilon, guarantee.delta, confidence)
            if mechanism is not None and mechanism.rate < 1 and participation.steps > 1:
                sentence += f"; they show less here, since {participation.steps} steps a round are seen as one sum"
            elif mechanism is not None and mechanism.noise == "laplace" and participation.rounds > 1:
                sentence += "; they show less here, since Laplace noise is added up over rounds"
            if f"{label}: {sentence}" not in said:
                said.add(f"{label}: {sentence}")
                _log_power(label, sentence, finds)


def _log_power(label: str, sentence: str, finds: bool) -> None:
    if finds:
        log.info("canaries, %s: %s", label, sentence)
        return
    log.warning(
        "canaries, %s: %s; this audit is too small to find anything, so take more canaries, or clients or rounds for "
        "which less is proved",
        label,
        sentence,
    )
