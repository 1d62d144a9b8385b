"""SME and IG beside their authors' released code: PSNR in dB and the weight of w_T at the end, of both."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base import metrics
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, use_one_thread
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.wire_format import State, Update
from studies.messages import attack_updates, image_knowledge
from studies.running import RUNS, Row, run_or_resume

ITERATIONS = 300
EXPERIMENT = {
    "data": {"name": "cifar100"},
    "partition": {"name": "iid", "samples_per_client": 10},
    "model": {"name": "sme-cnn", "channels": [64, 128], "hidden": 200},
    "training": {"local_epochs": 20, "batch_size": 10, "learning_rate": 0.004},
    "federation": {"engine": "serial", "clients": 20, "rounds": 1, "seed": 1},
    "adversary": {"when": "never"},
}


@dataclass(frozen=True)
class ParityVictim:
    """One client of a recorded run: what it sent, and what it trained on, by ascending label."""

    experiment: Experiment
    update: Update
    data: Tensor
    labels: Tensor
    number: int

    @property
    def rng(self) -> torch.Generator:
        """Return what draws the dummy data that both attacks start from."""
        return generator(self.experiment.seed, "parity", self.number)

    def model(self, state: State) -> nn.Module:
        """Return a network with these weights."""
        network = copy.deepcopy(self.experiment.model)
        network.load_state_dict(dict(state))
        return network

    def psnr(self, claimed: Tensor) -> float:
        """Return the mean over the images, each paired with the claim assigned to it, in dB."""
        return metrics.psnr(claimed[metrics.match_examples(claimed, self.data)], self.data).mean().item()


@cache
def load_victims() -> dict[int, ParityVictim]:
    """Return the clients of the recorded run, which is made where it is not there."""
    path = RUNS / "parity"
    run = run_or_resume(EXPERIMENT, path)
    experiment, number = Experiment(load_config(path / "experiment.toml")), run.transcript.rounds[0]
    victims = {}
    for client in run.transcript.clients(number)[:4]:
        data, labels = experiment.data.train(client)
        labels, order = labels.sort()
        victims[client] = ParityVictim(experiment, run.transcript.update(number, client), data[order], labels, client)
    return victims


def measure(client: int, attack: str) -> Row:
    """Attack one client by our code and by theirs."""
    victim = load_victims()[client]
    kind, weight = (InvertingGradients, 0.0) if attack == "IG" else (SurrogateModelExtension, 0.5)
    update = Update(
        round=1, client=0, before=victim.update.before, payload=victim.update.payload,
        num_examples=victim.update.num_examples,
    )  # fmt: skip
    with use_one_thread():
        knowledge = image_knowledge(victim.experiment, victim.labels)
        found, _ = attack_updates(kind(iterations=ITERATIONS), [update], knowledge, victim.rng)
        assert isinstance(found, Reconstruction)
        alpha = found.trace.get("alpha")
        psnr, their_weight = attack_by_official_code(victim, weight)
    our_weight = 0.0 if alpha is None else 1 - alpha[-1].item()
    return {"theirs": psnr, "ours": victim.psnr(found.data), "their weight": their_weight, "our weight": our_weight}


@contextlib.contextmanager
def official_class() -> Iterator[Any]:
    """Import the authors' attack, which prints.

    Raises:
        ConfigError: OFFICIAL names no checkout.
    """
    if not (folder := os.environ.get("OFFICIAL")):
        raise ConfigError("OFFICIAL is not set; point it at a checkout of the authors' repository")
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        yield importlib.import_module("sme.Adversary").IWU


def attack_by_official_code(victim: ParityVictim, weight: float) -> tuple[float, float]:
    """Return PSNR and weight of w_T, which starts at `weight` and stays where that is 0 (IG)."""
    data = victim.experiment.data
    inputs = data.to_model(victim.data)
    mean, std = (moment.tolist() for moment in victim.experiment.dataset.standardisation)
    with tempfile.TemporaryDirectory() as folder, official_class() as adversary:
        attack = adversary(
            trainloader=[(inputs, victim.labels)],
            setup={"device": torch.device("cpu"), "dtype": torch.float32},
            alpha=weight,
            test_steps=ITERATIONS,
            path_to_res=folder,
            mean_std=(mean, std),
            lamb=0.01,
        )
        attack.net0, attack.net1 = victim.model(victim.update.before), victim.model(victim.update.after)
        low, high = (torch.tensor(end).reshape(1, -1, 1, 1) for end in data.value_range())
        attack.x.data = torch.randn(inputs.shape, generator=victim.rng).clamp(low, high)
        attack.reconstruction(eta=1.0, beta=0.001, iters=ITERATIONS, lr_decay=True, save_figure=False)
    shape = (1, -1, 1, 1)
    claimed = attack.x.detach() * torch.tensor(std).reshape(shape) + torch.tensor(mean).reshape(shape)
    return victim.psnr(claimed), attack.alpha.item()
