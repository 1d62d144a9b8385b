"""Train the states that an experiment file asks for, unless they exist (`fedsim train`).

They are states of a federation after some rounds, or of central training on the whole training set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.files import replace_atomically, write_remedy
from fedsim.base.progress import track
from fedsim.base.randomness import generator, seed_globals, use_one_thread
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
from fedsim.recording.wire_format import non_finite_names
from fedsim.training.loop import evaluate, new_optimizer
from fedsim.training.model_state import copy_state, load_state
from fedsim.training.modes import forward, freeze_parameters, set_modes

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
            experiment.check()
            folder.prepare(resume=folder.experiment.is_file(), overwrite=False)
            folder.write_experiment(config)
            train_centrally(experiment, states, missing_epochs, made_by)
    if still_missing := states.find_missing(missing):
        raise RunError(
            f"{states.path(still_missing[0])}: was made once and is gone; remove {folder.path} and train again"
        )
    return states


def train_centrally(
    experiment: Experiment, states: TrainingStates, missing: Sequence[int], made_by: Mapping[str, Any]
) -> None:
    """Train on the whole training set and save the states after the epochs that are `missing`.

    Optimizer, step size and batch size are those of `[training]`, whose epochs or steps a round do
    not count here; the step size is multiplied by `decay` after each of the epochs `decay_at`. An
    interrupted training, or one that now needs later epochs, continues from the last state that it
    saved and ends with the same bytes.
    """
    resume_file = states.folder / "resume.safetensors"
    run = _CentralTraining(experiment)
    last_epoch = run.resume(resume_file, min(missing))
    with use_one_thread():
        epochs = range(last_epoch + 1, max(missing) + 1)
        for epoch in track(epochs, "epochs", len(epochs)):
            start = time.monotonic()
            loss = f"training loss {run.epoch(epoch):.3f}, " if epoch else ""
            if epoch in missing:
                metrics = run.evaluate()
                states.save_state(f"epoch-{epoch}", copy_state(run.model), made_by, {"epoch": epoch, **metrics})
                run.save(resume_file, epoch)
                seconds = time.monotonic() - start
                text = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
                log.info("epoch %d kept: %stest %s, %.1f s", epoch, loss, text, seconds)


class _CentralTraining:
    """Network in central training, with its optimizer."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._device = experiment.device()
        self.model = experiment.new_model().to(self._device)
        load_state(self.model, {k: v.to(self._device) for k, v in experiment.initial_model_state().items()})
        self._optimizer = new_optimizer(self.model, experiment.training)
        self._loss = experiment.dataset.task.loss
        data = experiment.dataset
        self._inputs = experiment.data.to_model(data.train.inputs()).to(self._device)
        self._labels = data.train.labels.to(self._device)

    def epoch(self, number: int) -> float:
        """Train for one pass over the shuffled training set; return the mean training loss."""
        experiment = self._experiment
        settings, table = experiment.training, experiment.config.states
        decays = sum(number > epoch for epoch in table.decay_at)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * table.decay**decays
        set_modes(self.model, settings, self._inputs)
        order = torch.randperm(len(self._labels), generator=generator(experiment.seed, "central", number))
        total = torch.zeros((), device=self._device)
        with seed_globals(experiment.seed, "central dropout", number), freeze_parameters(self.model, settings):
            for index in torch.split(order, settings.batch_size):
                loss = self._experiment.loss(forward(self.model, self._inputs[index]), self._labels[index])
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                total += loss.detach() * len(index)
        if broken_names := non_finite_names(copy_state(self.model)):
            raise RunError(
                f"central training diverged: {broken_names[0]} is NaN or infinite after epoch "
                f"{number}; lower training.learning_rate"
            )
        return total.item() / len(order)

    def evaluate(self) -> dict[str, float]:
        """Compute loss and accuracy on the test set."""
        test = self._experiment.dataset.test
        inputs = self._experiment.data.to_model(test.inputs()).to(self._device)
        return evaluate(self.model, copy_state(self.model), inputs, test.labels.to(self._device), self._loss)

    def save(self, path: Path, epoch: int) -> None:
        """Write the model and the optimizer's memory, from which training can continue."""
        tensors: dict[str, Tensor] = {f"model/{name}": t for name, t in self.model.state_dict().items()}
        for number, memory in enumerate(self._optimizer.memory):
            tensors |= {f"optimizer/{number}/{key}": tensor for key, tensor in memory.items()}
        try:
            with replace_atomically(path) as temporary:
                save_file(
                    {k: t.contiguous() for k, t in tensors.items()},
                    temporary,
                    metadata={"epoch": str(epoch)},
                )
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}); {write_remedy(error)} and train again") from error

    def resume(self, path: Path, before: int) -> int:
        """Restore what `save` wrote; return its epoch, or -1 if none is earlier than `before`."""
        if not path.is_file():
            return -1
        try:
            with safe_open(path, framework="pt", device=str(self._device)) as file:
                epoch = int(file.metadata()["epoch"])
                if epoch >= before:
                    return -1
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path}: is damaged ({error}); remove it to train from the beginning") from error
        model_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        self.model.load_state_dict({name.removeprefix("model/"): t for name, t in model_tensors.items()})
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/")
                self._optimizer.memory[int(number)][key] = tensor.clone()
        log.info("going on after epoch %d", epoch)
        return epoch
