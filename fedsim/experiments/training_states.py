"""`fedsim train`: make the states that an experiment file asks for, or find them made already."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from fedsim.datasets.cache import cache_folder
from fedsim.errors import ConfigError, RunError
from fedsim.experiments.build import Experiment, resolve
from fedsim.experiments.config import AdversaryTable, Config, RecordingTable
from fedsim.experiments.run_folder import RunFolder
from fedsim.experiments.settings import made_with
from fedsim.experiments.simulation import federate
from fedsim.experiments.states import States

log = logging.getLogger(__name__)


def make_states(config: Config, name: str, out: Path | None) -> States:
    """The states that `[states]` names, after rounds of the federation and epochs of central training.

    What is there already, in `out` or by default in the cache, is not made again; what was interrupted
    goes on.

    Args:
        name: of the experiment, for a folder in the cache.
        out: a run folder; no server records in it, and no attack is run.

    Raises:
        ConfigError: no state is asked for, or `out` holds something else.
        RunError: training failed. States kept before stay usable.
    """
    rounds = {f"round-{number}": number for number in config.states.rounds}
    epochs = {f"epoch-{number}": number for number in config.states.epochs}
    wanted = [*rounds, *epochs]
    if not wanted:
        raise ConfigError("states: no state is asked for; add [states] with rounds or epochs, e.g. epochs = [0, 10]")
    quiet = {"attack": [], "measure": [], "adversary": AdversaryTable(), "recording": RecordingTable(rounds=[])}
    experiment = Experiment(config := resolve(config.model_copy(update=quiet)))
    made_by = made_with(experiment)
    key = hashlib.sha256(json.dumps(made_by["experiment"], sort_keys=True).encode()).hexdigest()[:12]
    folder = RunFolder(out or cache_folder() / "states" / f"{name}-{key}")
    states = States(folder.states)
    known = states.manifest()
    if known and known["experiment"] != made_by["experiment"]:
        raise ConfigError(f"{folder.path}: holds states of another experiment; choose another --out")
    missing = states.lacks(wanted)
    if not missing:
        log.info("all %d states are there already", len(wanted))
        return states
    with folder.held():
        if any(state in rounds for state in missing):
            federate(config, folder, resume=folder.experiment.is_file())
        if later := [epochs[state] for state in missing if state in epochs]:
            from fedsim.experiments.central import train_centrally

            experiment.check()
            folder.prepare(resume=folder.experiment.is_file(), overwrite=False)
            folder.write_experiment(config)
            train_centrally(experiment, states, later, made_by)
    if gone := states.lacks(missing):
        raise RunError(f"{states.path(gone[0])}: was made once and is gone; remove {folder.path} and train again")
    return states
