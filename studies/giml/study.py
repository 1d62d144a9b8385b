"""A prior from the recorded gradients alone, beside none and one from public images; docs/explanation/inversion.md."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.transcript_generator import ImageGenerator
from adversaries.inversion.transcript_prior import TranscriptPrior
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.attack import Attack, Progress, Target
from fedsim.interfaces.defense_calls import apply_on_update
from fedsim.interfaces.knowledge import Records
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from studies.messages import gradient_update, image_knowledge, mean_gradient, one_client_experiment, score_claim
from studies.running import RUNS, Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

SEED, CLIENTS, VICTIMS, FLOOR, PUBLIC = 1, 50, 6, 1000, 5000
"""Floors are guesses from the first test images, and the principal components are of those after them."""
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("LeNet, MNIST", {"name": "lenet"}),
    "cifar10": ("SME's CNN / 4, CIFAR-10", {"name": "sme-cnn", "channels": [16, 32], "hidden": 100}),
}
METRICS = ("psnr", "ssim", "identified")
DEFENSES: dict[str, dict[str, Any]] = {
    "update-noise 0.02": {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.02},
    "quantise qsgd 4": {"name": "quantise", "scheme": "qsgd", "bits": 4},
}
"""Those of docs/studies/defenses.md by their names there; all clients have them, and no attack is told of them."""


@dataclass(frozen=True, kw_only=True)
class OtherwiseTaught(TranscriptPrior):
    """The attack with a generator that is learnt from another recording, see `transcript_of`."""

    data: str
    size: int
    defense: str
    messages: str

    def _find_generator(self, target: Target, shape: tuple[int, ...], progress: Progress) -> ImageGenerator:
        transcript = transcript_of(self.data, self.size, self.defense, self.messages)
        return super()._find_generator(replace(target, transcript=transcript), shape, progress)


def attack_of(name: str, data: str, size: int, defense: str) -> Attack:
    """Return an attack; `longer` makes as many steps as `giml` with a sixth of the learning."""
    if name in ("noise", "others"):
        return OtherwiseTaught(data=data, size=size, defense=defense, messages=name)
    if name == "longer":
        return InvertingGradients(iterations=1300, step_size=0.1)
    if name in ("giml", "untrained"):
        return TranscriptPrior(**({} if name == "giml" else {"tasks": 0}))
    return InvertingGradients(iterations=300, step_size=0.1, prior="pca" if name == "pca" else "none")


@cache
def experiment_of(data: str) -> Experiment:
    """Return an experiment with one client, of the data set and its network."""
    return one_client_experiment({"name": data}, NETWORKS[data][1], SEED)


def images_of(data: str, size: int, client: int) -> tuple[Tensor, Tensor]:
    """Return the images of a client in [0, 1], and their labels."""
    training, index = experiment_of(data).dataset.train, torch.arange(client * size, (client + 1) * size)
    return training.inputs(index), training.labels[index]


@cache
def transcript_of(data: str, size: int, defense: str, messages: str = "all") -> Transcript:
    """Return a recording of one gradient of each client at the first weights, which is made once in a process.

    Args:
        messages: `all`; `others` leaves out the victims; `noise` is Gaussian noise of the gradients' norms.
    """
    experiment, updates = experiment_of(data), []
    network, before = experiment.new_model(), experiment.initial_state()
    network.load_state_dict(before)
    for client in range(VICTIMS if messages == "others" else 0, CLIENTS):
        images, labels = images_of(data, size, client)
        gradient = mean_gradient(network, experiment.data.to_model(images), labels)
        if messages == "noise":
            rng = generator(SEED, "giml noise", client)
            drawn = {name: torch.randn(sent.shape, generator=rng) for name, sent in gradient.items()}
            gradient = {name: drawn[name] * (sent.norm() / drawn[name].norm()) for name, sent in gradient.items()}
        sent_gradient = defend(gradient, defense, client)
        updates.append(replace(gradient_update(before, sent_gradient, size), client=client))
    folder = RUNS / "giml" / f"{data}-{size}-{defense}-{messages}"
    shutil.rmtree(folder, ignore_errors=True)
    Recorder(folder / "transcript").write(1, updates)
    return Transcript(folder / "transcript")


def defend(gradient: Mapping[str, Tensor], defense: str, client: int) -> dict[str, Tensor]:
    """Return what a client sends of its gradient."""
    if defense == "none":
        return dict(gradient)
    settings = DEFENSES[defense]
    made = registry.build("defenses", settings["name"], {k: v for k, v in settings.items() if k != "name"}, defense)
    sent = apply_on_update(made, gradient, LocalContext(rng=generator(SEED, "giml defense", client)))
    return dict(sent.values("delta", gradient) if isinstance(sent, Payload) else sent)


def measure(data: str, size: int, defense: str, attack: str) -> list[Row]:
    """Attack the first clients; seconds are of the processor, and those of the first include the learning.

    What was learnt before is not used, as it would take no time.
    """
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", FEDSIM_CACHE=folder):
        return attack_clients(data, size, defense, attack)


def attack_clients(data: str, size: int, defense: str, attack: str) -> list[Row]:
    """Return a row for each of the first clients."""
    experiment, rows = experiment_of(data), list[Row]()
    test = experiment.dataset.test
    public = slice(FLOOR, FLOOR + PUBLIC)
    records = Records(inputs=experiment.data.to_model(test.inputs(public)), labels=test.labels[public])
    for victim in range(VICTIMS):
        images, labels = images_of(data, size, victim)
        knowledge = image_knowledge(experiment, labels, auxiliary=records)
        rng = generator(SEED, "giml study", victim)
        target = Target(transcript=transcript_of(data, size, defense), victim=victim, knowledge=knowledge, rng=rng)
        started = time.process_time()
        finding: Any = attack_of(attack, data, size, defense).run(target)
        row: Row = {"client": victim, "seconds": time.process_time() - started}
        truth = Truth(data=images, labels=labels)
        scores = score_claim(finding, truth, generator(SEED, "floors", victim), test, FLOOR, labels_granted=True)
        for metric in METRICS:
            row |= {metric: scores[metric].value, f"{metric} floor": scores[metric].floor}
        row["l_sim"] = float(finding.trace["l_sim"][-1])
        rows.append(row)
    return rows


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each data set, N, defense and attack."""
    lines = []
    for (data, size, defense, attack), cell in group_rows(rows, "data", "size", "defense", "attack").items():
        gains = column_values(cell, "psnr") - column_values(cell, "psnr floor")
        bare = select_rows(rows, data=data, size=size, defense=defense, attack="inverting-gradients")
        against = column_values(cell, "psnr") - column_values(bare, "psnr")
        line = [NETWORKS[str(data)][0], size, defense, attack, with_interval(column_values(cell, "psnr"), ".1f")]
        line += [
            with_interval(gains, "+.1f"),
            "–" if attack == "inverting-gradients" else with_interval(against, "+.1f"),
        ]
        line.append(f"{column_values(cell, 'ssim').mean():.2f}")
        line.append(with_interval(100 * column_values(cell, "identified"), ".0f"))
        line.append(f"{100 * column_values(cell, 'identified floor').mean():.0f}")
        line += [f"{column_values(cell, 'l_sim').mean():.4f}", f"{column_values(cell, 'seconds').sum():.0f}"]
        lines.append(line)
    head = [
        "network",
        "N",
        "defense",
        "attack",
        "PSNR (dB)",
        "beyond the guess",
        "beyond no prior",
        "SSIM",
        "identified (%)",
    ]
    return {"": markdown_table([*head, "by chance (%)", "distance", "seconds for all"], lines)}


def with_interval(values: Any, form: str) -> str:
    """Return the mean with half of its 95 % interval."""
    low, high = confidence_interval(values)
    return f"{values.mean():{form}} ± {(high - low) / 2:.1f}"
