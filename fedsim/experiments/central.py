"""Central training: one party that holds the whole training set, and the states that it passes through."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import RunError
from fedsim.experiments.build import Experiment
from fedsim.experiments.states import States
from fedsim.files import in_one_step
from fedsim.progress import tracked
from fedsim.randomness import generator, one_thread, seeded
from fedsim.training.loop import evaluate, new_optimizer
from fedsim.training.model_state import load_state, state_of
from fedsim.training.modes import forward, frozen, set_modes
from fedsim.wire.messages import non_finite

log = logging.getLogger(__name__)


def train_centrally(experiment: Experiment, states: States, missing: Sequence[int], made_by: Mapping[str, Any]) -> None:
    """Train on the whole training set and keep the states after the epochs that are `missing`.

    Optimizer, step size and batch size are those of `[training]`, whose epochs or steps a round do
    not count here; the step size is multiplied with `decay` after each of the epochs `decay_at`. An
    interrupted training, or one of which later epochs are wanted now, goes on from the last state
    that it kept and ends with the same bytes.

    Raises:
        RunError: the weights became NaN or infinite, or the folder cannot be written.
    """
    memory = states.folder / "resume.safetensors"
    run = _Central(experiment)
    reached = run.resume(memory, min(missing))
    with one_thread():
        epochs = range(reached + 1, max(missing) + 1)
        for epoch in tracked(epochs, "epochs", len(epochs)):
            started = time.monotonic()
            loss = f"training loss {run.epoch(epoch):.3f}, " if epoch else ""
            if epoch in missing:
                measured = run.evaluate()
                states.keep(f"epoch-{epoch}", state_of(run.model), made_by, {"epoch": epoch, **measured})
                run.save(memory, epoch)
                seconds = time.monotonic() - started
                text = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
                log.info("epoch %d kept: %stest %s, %.1f s", epoch, loss, text, seconds)


class _Central:
    """A network during training, with its optimizer."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._device = experiment.device()
        self.model = experiment.new_model().to(self._device)
        load_state(self.model, {k: v.to(self._device) for k, v in experiment.initial_state().items()})
        self._optimizer = new_optimizer(self.model, experiment.training)
        self._loss = experiment.dataset.task.loss
        data = experiment.dataset
        self._inputs = experiment.data.to_model(data.train.inputs()).to(self._device)
        self._labels = data.train.labels.to(self._device)

    def epoch(self, number: int) -> float:
        """One pass over the training set, in an order of its own; the mean training loss."""
        experiment = self._experiment
        settings, wanted = experiment.training, experiment.config.states
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * wanted.decay ** sum(number > end for end in wanted.decay_at)
        set_modes(self.model, settings, self._inputs)
        order = torch.randperm(len(self._labels), generator=generator(experiment.seed, "central", number))
        total = torch.zeros((), device=self._device)
        with seeded(experiment.seed, "central dropout", number), frozen(self.model, settings):
            for index in torch.split(order, settings.batch_size):
                loss = self._experiment.loss(forward(self.model, self._inputs[index]), self._labels[index])
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                total += loss.detach() * len(index)
        if broken := non_finite(state_of(self.model)):
            raise RunError(
                f"central training diverged: {broken[0]} is NaN or infinite after epoch {number}; "
                "lower training.learning_rate"
            )
        return total.item() / len(order)

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test set."""
        test = self._experiment.dataset.test
        inputs = self._experiment.data.to_model(test.inputs()).to(self._device)
        return evaluate(self.model, state_of(self.model), inputs, test.labels.to(self._device), self._loss)

    def save(self, path: Path, epoch: int) -> None:
        """Write what going on needs."""
        tensors: dict[str, Tensor] = {f"model/{name}": t for name, t in self.model.state_dict().items()}
        for place, memory in enumerate(self._optimizer.memory):
            tensors |= {f"optimizer/{place}/{key}": tensor for key, tensor in memory.items()}
        try:
            with in_one_step(path) as temporary:
                save_file({k: t.contiguous() for k, t in tensors.items()}, temporary, metadata={"epoch": str(epoch)})
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}); make room and train again") from error

    def resume(self, path: Path, before: int) -> int:
        """Go back to where `save` left off; the epoch that this was, -1 where there is none earlier than `before`."""
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
        self.model.load_state_dict({k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")})
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, place, key = name.split("/")
                self._optimizer.memory[int(place)][key] = tensor.clone()
        log.info("going on after epoch %d", epoch)
        return epoch
