"""Train the states that an experiment file asks for, unless they exist (`fedsim train`)."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from fedsim.base.errors import ConfigError, RunError
from fedsim.data.cache import cache_folder
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.federation_tables import RecordingTable
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.settings import training_fingerprint
from fedsim.federation.simulation import run_federation
from fedsim.federation.states import TrainingStates

log = logging.getLogger(__name__)


def make_states(config: Config, name: str, out: Path | None) -> TrainingStates:
    """Train the states that `[states]` names, by rounds of the federation and central epochs.

    States that exist, in `out` or by default in the cache, are not trained again; interrupted
    training continues.

    Args:
        name: of the experiment, for a folder in the cache.
        out: a run folder; nothing is recorded in it, and no attack is run.
    """
    rounds = {f"round-{number}": number for number in config.states.rounds}
    epochs = {f"epoch-{number}": number for number in config.states.epochs}
    names = [*rounds, *epochs]
    if not names:
        raise ConfigError("states: no state is asked for; add [states] with rounds or epochs, e.g. epochs = [0, 10]")
    # Neither record nor attack nor measure.
    update = {
        "attack": [],
        "measure": [],
        "adversary": AdversaryTable(),
        "recording": RecordingTable(rounds=[]),
    }
    config = resolve(config.model_copy(update=update))
    experiment = Experiment(config)
    # Compare with the states that exist.
    made_by = training_fingerprint(experiment)
    key = hashlib.sha256(json.dumps(made_by["experiment"], sort_keys=True).encode()).hexdigest()[:12]
    folder = OpenRun(out or cache_folder() / "states" / f"{name}-{key}")
    states = TrainingStates(folder.states)
    manifest = states.manifest()
    if manifest and manifest["experiment"] != made_by["experiment"]:
        raise ConfigError(f"{folder.path}: holds states of another experiment; choose another --out")
    missing = states.find_missing(names)
    if not missing:
        log.info("all %d states are there already", len(names))
        return states
    # Train those that are missing.
    with folder.hold_lock():
        if any(state in rounds for state in missing):
            run_federation(config, folder, resume=folder.experiment.is_file())
        if missing_epochs := [epochs[state] for state in missing if state in epochs]:
            from fedsim.federation.central_training import train_centrally

            experiment.check()
            folder.prepare(resume=folder.experiment.is_file(), overwrite=False)
            folder.write_experiment(config)
            train_centrally(experiment, states, missing_epochs, made_by)
    if still_missing := states.find_missing(missing):
        raise RunError(
            f"{states.path(still_missing[0])}: was made once and is gone; remove {folder.path} and train again"
        )
    return states
