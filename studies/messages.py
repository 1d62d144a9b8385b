"""One client's message and an attack on it, without a federation: what studies of single messages share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import use_one_thread
from fedsim.base.task import Loss, Task
from fedsim.data import Examples
from fedsim.exposure.measure import Measure
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.training_states import make_states
from fedsim.interfaces.attack import Attack, Target
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.modality import PublicExamples
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.message_function import ClientMessage
from studies.running import RUNS, Row


def data_folder() -> Path:
    """Return the folder of data sets.

    Raises:
        ConfigError: none is named.
    """
    if (folder := find_data_folder()) is None:
        raise ConfigError("FEDSIM_DATA is not set; point it at the folder with the data sets")
    return folder


def mean_gradient(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Any = cross_entropy) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over a batch, by parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(model(inputs), labels), parameters), strict=True))


def gradient_update(before: State, gradient: Mapping[str, Tensor], count: int, number: int = 1) -> Update:
    """Return the message of client 0 that sends a gradient of `count` examples in round `number`."""
    payload = Payload.from_dense(dict(gradient), "gradient")
    return Update(round=number, client=0, before=before, payload=payload, num_examples=count)


def weights_update(before: State, after: Mapping[str, Tensor], count: int, client: int = 0, number: int = 1) -> Update:
    """Return the message of a client that sends its weights after training on `count` examples."""
    payload = Payload.from_dense(dict(after), "weights")
    return Update(round=number, client=client, before=before, payload=payload, num_examples=count)


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


def task_knowledge(model: Callable[[], nn.Module], task: Task, **more: Any) -> Knowledge:
    """Return what a task tells of a client's examples; `more` adds facts."""
    known = Knowledge(model=model, loss=task.loss, input_shape=task.input_shape, num_classes=task.num_classes)
    return replace(known, **more)


def image_knowledge(experiment: Experiment, labels: Tensor, **more: Any) -> Knowledge:
    """Return what is known of a client's images but the images themselves; `more` replaces or adds facts."""
    data = experiment.data
    mean, std = data.moments()
    facts = {"value_range": data.value_range(), "input_mean": mean, "input_std": std, "labels": labels}
    known = task_knowledge(experiment.new_model, data.dataset.task, loss=experiment.loss, **facts)
    return replace(known, **more)


def score_claim(
    finding: Any,
    truth: Truth,
    rng: torch.Generator,
    examples: Examples | None = None,
    count: int | None = None,
    **known: Any,
) -> dict[str, Score]:
    """Return the scores by metric, beside guesses from the first `count` of public examples, or from all."""
    public = None
    if examples is not None:
        public = PublicExamples(data=examples.inputs(slice(0, count)), labels=examples.labels[:count])
    return {score.metric: score for score in score_examples(finding, truth, public=public, rng=rng, **known)}


def measure_message(
    tables: Mapping[str, Mapping[str, Any]], model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor
) -> list[Row]:
    """Return a row for each value of measures of one gradient, whose derivatives they share; `tables` are by label."""
    sent, rows = ClientMessage.create(model, loss, inputs, labels), list[Row]()
    for label, table in tables.items():
        settings = {name: value for name, value in table.items() if name != "name"}
        by: Measure = registry.build("measures", str(table["name"]), settings, label)
        rows += ({"measure": f"{label}.{name}", "value": v} for name, v in by.compute_for_message(sent).items())
    return rows


def pair_psnr(claimed: Tensor, true: Tensor) -> float:
    """Return the mean PSNR over images, each paired with the claim assigned to it, in dB."""
    return metrics.psnr(metrics.pair_examples(claimed, true), true).mean().item()


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


def central_tables(
    data: Mapping[str, Any], model: Mapping[str, Any], seed: int, decay_at: Sequence[int] = (), **training: Any
) -> dict[str, Any]:
    """Return an experiment of one client, and with [states] how a network is trained on all data.

    Args:
        decay_at: epochs after which the learning rate falls to a tenth.
        training: settings beside an epoch a round.
    """
    return {
        "data": data,
        "model": model,
        "training": {"local_epochs": 1, **training},
        "federation": {"engine": "serial", "clients": 1, "rounds": 1, "seed": seed},
        "states": {"decay_at": list(decay_at), "decay": 0.1} if decay_at else {},
    }


def one_client_experiment(data: Mapping[str, Any], model: Mapping[str, Any], seed: int) -> Experiment:
    """Return an experiment with one client, who takes one step; studies make messages by its model and data."""
    tables = {
        "data": data,
        "model": model,
        "training": {"local_steps": 1},
        "federation": {"engine": "serial", "clients": 1, "rounds": 1, "seed": seed},
    }
    return Experiment(validate_tables(Config, tables, "study"))


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
