"""One client's message and an attack on it, without a federation: what studies of single messages share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedsim
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.perceptual_distance import lpips_distances
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import use_one_thread
from fedsim.federation.build import Experiment, find_data_folder
from fedsim.federation.config import AttackFile, Config, validate_tables
from fedsim.federation.training_states import make_states
from fedsim.interfaces.attack import Attack, Target
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from studies.running import RUNS


def data_folder() -> Path:
    """Return the folder of data sets.

    Raises:
        ConfigError: none is named.
    """
    if (folder := find_data_folder()) is None:
        raise ConfigError("FEDSIM_DATA is not set; point it at the folder with the data sets")
    return folder


def copy_parameters(model: nn.Module) -> State:
    """Copy everything of a model that travels."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def mean_gradient(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Any = cross_entropy) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over a batch, by parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(model(inputs), labels), parameters), strict=True))


def gradient_update(before: State, gradient: Mapping[str, Tensor], count: int, number: int = 1) -> Update:
    """Return the message of client 0 that sends a gradient of `count` examples in round `number`."""
    payload = Payload.from_dense(dict(gradient), "gradient")
    return Update(round=number, client=0, before=before, payload=payload, num_examples=count)


def attack_updates(
    attack: Attack, updates: Sequence[Update], knowledge: Knowledge, rng: torch.Generator
) -> tuple[Finding, float]:
    """Attack client 0, of whom these updates are recorded; return the finding and the processor time.

    Raises:
        AttackError: the attack cannot be made.
    """
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "transcript")
        for update in updates:
            recorder.write(update.round, [update])
        started = time.process_time()
        transcript = Transcript(Path(folder) / "transcript")
        finding = attack.run(Target(transcript=transcript, victim=0, knowledge=knowledge, rng=rng))
        return finding, time.process_time() - started


def invert_update(attack: Any, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Any:
    """Return what an attack by gradient matching claims of one update, on one thread."""
    with use_one_thread():
        return attack.invert(update, knowledge, rng, lambda *_: None)


def image_knowledge(experiment: Experiment, labels: Tensor, **more: Any) -> Knowledge:
    """Return what is known of a client's images but the images themselves; `more` replaces or adds facts."""
    data = experiment.data
    mean, std = data.moments()
    facts = {
        "model": experiment.new_model,
        "loss": experiment.loss,
        "input_shape": data.dataset.task.input_shape,
        "num_classes": data.dataset.num_classes,
        "value_range": data.value_range(),
        "input_mean": mean,
        "input_std": std,
        "labels": labels,
    }
    return Knowledge(**facts | more)


@contextmanager
def attack_federation(
    tables: dict[str, Any], attacks: list[dict[str, Any]], rounds: int | Sequence[int]
) -> Iterator[tuple[fedsim.Run, Audit]]:
    """Run an experiment and attack all clients in these rounds, in a folder that does not stay.

    Raises:
        RuntimeError: attacks failed.
    """
    numbers = list(range(1, rounds + 1)) if isinstance(rounds, int) else list(rounds)
    adversary = {"victims": "all", "rounds": numbers, "workers": 1}
    spec = validate_tables(AttackFile, {"adversary": adversary, "attack": attacks}, "study")
    with tempfile.TemporaryDirectory() as folder:
        run = fedsim.run(tables | {"recording": {"rounds": numbers}}, out=Path(folder) / "run")
        audit = open_audit(run.path, spec, trust=True)  # a defense may be code that the run folder names
        if failures := audit.run():
            raise RuntimeError("; ".join(failures))
        yield run, audit


def perceive_distances(claimed: Tensor, true: Tensor) -> Tensor:
    """Return the LPIPS of each image.

    Raises:
        ConfigError: its weights are not there.
    """
    distances = lpips_distances(claimed, true, data_folder() / "weights")
    if isinstance(distances, str):
        raise ConfigError(f"LPIPS: {distances}")
    return distances


@cache
def trained_states(study: str, name: str, epochs: tuple[int, ...], read: Any) -> dict[int, State]:
    """Return the states of a central training after these epochs, which is made where it is not there.

    Args:
        study: its name.
        name: what tells the training from others of the study.
        epochs: after which states are kept.
        read: returns the tables of the experiment, with [states].
    """
    tables = read()
    tables["states"] = {**tables.get("states", {}), "epochs": list(epochs)}
    config = validate_tables(Config, tables, study)
    states = make_states(config, study, RUNS / study / name)
    return {epoch: load_file(states.path(f"epoch-{epoch}")) for epoch in epochs}
