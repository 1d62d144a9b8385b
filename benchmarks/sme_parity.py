"""SME and IG beside their authors' released code, on the same updates, labels and dummy data.

    git clone https://github.com/JunyiZhu-AI/surrogate_model_extension OFFICIAL
    fedsim run benchmarks/sme-table2-cifar100.toml --set training.local_epochs=20 --set 'attack=[]' --out runs/parity
    python benchmarks/sme_parity.py OFFICIAL runs/parity --victims 4 --iterations 300

Their code runs as it is, and nothing of it is here. It starts from the dummy data that ours draws, and is told the
labels in the same order. Prints a row a victim and attack: PSNR in dB and the weight of w_T at the end, of both.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base import metrics
from fedsim.base.randomness import generator, use_one_thread
from fedsim.federation.build import Experiment
from fedsim.federation.reading import load_config
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.matching import GradientInversion
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

KEY = "parity"


@dataclass(frozen=True)
class Victim:
    """One client of a recorded run: what it sent, and what it trained on, by ascending label."""

    experiment: Experiment
    update: Update
    data: Tensor
    labels: Tensor

    @property
    def dummy(self) -> torch.Generator:
        """Draws the dummy data that both attacks start from."""
        return generator(self.experiment.seed, KEY, self.update.client)

    def model(self, state: State) -> nn.Module:
        """A network with these weights."""
        network = copy.deepcopy(self.experiment.model)
        network.load_state_dict(dict(state))
        return network

    def psnr(self, claimed: Tensor) -> float:
        """Mean over the images, each paired with the claim assigned to it, in dB."""
        return metrics.psnr(claimed[metrics.match_examples(claimed, self.data)], self.data).mean().item()


def victims(run: Path, count: int) -> Iterator[Victim]:
    """The first `count` clients of the first round."""
    experiment, transcript = Experiment(load_config(run / "experiment.toml")), Transcript(run)
    number = transcript.rounds[0]
    for client in transcript.clients(number)[:count]:
        data, labels = experiment.data.train(client)
        labels, order = labels.sort()
        yield Victim(experiment, transcript.update(number, client), data[order], labels)


def ours(attack: GradientInversion, victim: Victim, transcript: Transcript) -> tuple[float, float]:
    """PSNR and weight of w_T."""
    data, dataset = victim.experiment.data, victim.experiment.dataset
    mean, std = data.moments()
    known = Knowledge(
        model=victim.experiment.new_model,
        loss=cross_entropy,
        input_shape=dataset.task.input_shape,
        num_classes=dataset.num_classes,
        value_range=data.value_range(),
        input_mean=mean,
        input_std=std,
        labels=victim.labels,
    )
    client, start = victim.update.client, victim.dummy
    found = attack.run(Target(transcript=transcript, victim=client, knowledge=known, rng=start), lambda *told: None)
    assert isinstance(found, Reconstruction)
    alpha = found.trace.get("alpha")
    return victim.psnr(found.data), 0.0 if alpha is None else 1 - alpha[-1].item()


def theirs(adversary: Any, victim: Victim, iterations: int, weight: float) -> tuple[float, float]:
    """PSNR and weight of w_T, which starts at `weight` and stays where that is 0 (IG)."""
    data = victim.experiment.data
    inputs = data.to_model(victim.data)
    mean, std = (moment.tolist() for moment in victim.experiment.dataset.standardisation)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        attack = adversary(
            trainloader=[(inputs, victim.labels)],
            setup={"device": torch.device("cpu"), "dtype": torch.float32},
            alpha=weight,
            test_steps=iterations,
            path_to_res=folder,
            mean_std=(mean, std),
            lamb=0.01,
        )
        attack.net0, attack.net1 = victim.model(victim.update.before), victim.model(victim.update.after)
        low, high = (torch.tensor(end).reshape(1, -1, 1, 1) for end in data.value_range())
        attack.x.data = torch.randn(inputs.shape, generator=victim.dummy).clamp(low, high)
        attack.reconstruction(eta=1.0, beta=0.001, iters=iterations, lr_decay=True, save_figure=False)
        shape = (1, -1, 1, 1)
        claimed = attack.x.detach() * torch.tensor(std).reshape(shape) + torch.tensor(mean).reshape(shape)
    return victim.psnr(claimed), attack.alpha.item()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("official", type=Path, help="a checkout of the authors' repository")
    parser.add_argument("run", type=Path, help="a run folder, recorded by benchmarks/sme-table2-cifar100.toml")
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=300)
    options = parser.parse_args()
    sys.path.insert(0, str(options.official))
    adversary = importlib.import_module("sme.Adversary").IWU
    attacks: list[tuple[str, GradientInversion, float]] = [
        ("IG", InvertingGradients(iterations=options.iterations), 0.0),
        ("SME", SurrogateModelExtension(iterations=options.iterations), 0.5),
    ]
    transcript = Transcript(options.run)
    print("| client | attack | theirs, dB | ours, dB | theirs, weight of w_T | ours |")
    print("|---|---|---|---|---|---|")
    with use_one_thread():
        for victim in victims(options.run, options.victims):
            for name, attack, weight in attacks:
                (psnr, alpha), (own, own_alpha) = (
                    theirs(adversary, victim, options.iterations, weight),
                    ours(attack, victim, transcript.restrict_to(transcript.rounds[:1])),
                )
                print(
                    f"| {victim.update.client} | {name} | {psnr:.2f} | {own:.2f} | {alpha:.3f} | {own_alpha:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
