"""Which states of a network leak most, and which measure foresees it: the study of the angular Lipschitz paper.

BatchNorm modes x epochs of training x ResNet18, its doubled and quadrupled widths and ConvNet on CIFAR-100. Four
stages; each keeps what is done and goes on from it. `--data-dir DIR` or FEDSIM_DATA has CIFAR-100 and the weights of
LPIPS; `--folder` gets the networks. `--models`, `--epochs` and `--batches` choose a part.

    python benchmarks/angular_study.py train      # the four networks, each with its states
    python benchmarks/angular_study.py attack     # benchmarks/results/angular-quality.csv
    python benchmarks/angular_study.py measure    # benchmarks/results/angular-measures.csv
    python benchmarks/angular_study.py floors     # prints what is reached without any gradient

`python benchmarks/angular_tables.py` shows what was found.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from lavp_study import RESULTS, append, begun, read, short
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.audit.evaluation.perceptual_distance import lpips_distances
from fedsim.base import metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, use_one_thread
from fedsim.exposure.angular_lipschitz import AngularLipschitz
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.gradient_norm import GradientNorm
from fedsim.exposure.lipschitz import Lipschitz
from fedsim.exposure.measure import Meaning, Measure
from fedsim.exposure.noises import NoiseEffects, NoiseMeasure
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.training_states import make_states
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import BatchNormStatistics, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state, load_state

QUALITY, MEASURED = RESULTS / "angular-quality.csv", RESULTS / "angular-measures.csv"
CELL = ("model", "epoch", "mode", "batch")
SCORES = ("mse", "pixel mse", "psnr", "lpips")
DROPS = ("distance before", "distance after", "objective before", "objective after")
QUALITY_COLUMNS = (*CELL, *SCORES, *DROPS)
MEASURED_COLUMNS = (*CELL, "measure", "value")
WIDTH = 4
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet18", "channels": WIDTH},
    "resnet18-2": {"name": "resnet18", "channels": WIDTH, "width": 2},
    "resnet18-4": {"name": "resnet18", "channels": WIDTH, "width": 4},
    "convnet": {"name": "convnet", "width": WIDTH},
}
"""Of a sixteenth of the paper's channels, 64, so that one core trains and attacks them in less than an hour."""
EPOCHS, DECAY_AT = (0, 1, 2, 5, 10, 20), (10, 15)
MODES = ("eval", "train")
SEED, BATCHES, BATCH, ITERATIONS, NOISES = 1, 3, 4, 100, 200


@dataclass(frozen=True, kw_only=True)
class Matching(GradientInversion):
    """GradAttack's attack with batch statistics given, in its strongest setting (Huang et al. 2021, `--BN_exact`).

    The client returns its gradient and its batch's mean and variance in each BatchNorm layer. GradAttack adds the
    variations along both axes, of which `TotalVariation` is half.

    Args:
        by_batch: BatchNorm layers normalise by the batch, at the client and here.
    """

    by_batch: bool

    def _recipe(self, scene: InversionProblem) -> Recipe:
        return Recipe(
            priors=[(2 * 0.1, TotalVariation()), (0.005, BatchNormStatistics())],
            step_size=0.1,
            signed=True,
            normalised_by_batch=self.by_batch,
        )


LIPSCHITZ: Mapping[str, NoiseMeasure] = {"lipschitz": Lipschitz(), "angular-lipschitz": AngularLipschitz()}


@dataclass(frozen=True, kw_only=True)
class BothLipschitz(NoiseMeasure):
    """L-tilde and L^cos of the same noises, so that each gradient is taken once and not twice."""

    noises: int = NOISES
    quantities: ClassVar[Mapping[str, Meaning]] = {
        f"{name}.{quantity}": meaning for name, one in LIPSCHITZ.items() for quantity, meaning in one.quantities.items()
    }

    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        return torch.stack([one._compare_messages(moves) for one in LIPSCHITZ.values()], 1)

    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        both = zip(LIPSCHITZ.values(), changes.T, strict=True)
        values = [value for one, of in both for value in one._summarise_changes(of).values()]
        return dict(zip(self.quantities, values, strict=True))


MEASURES: Mapping[str, Callable[[], Measure]] = {
    "gradient-norm": GradientNorm,
    "": BothLipschitz,
    "expected-error": ExpectedError,
}
"""By what the names of their quantities begin with."""


@dataclass(frozen=True)
class Trained:
    """A network and its states.

    Attributes:
        folder: of all weights.
    """

    name: str
    folder: Path = field(compare=False)

    @cached_property
    def experiment(self) -> Experiment:
        """Central training by the paper's SGD; its tenths after 150 and 225 of 300 epochs are here after 10 and 15."""
        return Experiment(self._config(EPOCHS))

    def _config(self, epochs: Sequence[int]) -> Config:
        tables = {
            "data": {"name": "cifar100"},
            "model": MODELS[self.name],
            "training": {"local_epochs": 1, "learning_rate": 0.1, "momentum": 0.9, "batch_size": 32},
            "federation": {"engine": "serial", "clients": 1, "rounds": 1, "seed": SEED},
            "states": {"epochs": list(epochs), "decay_at": list(DECAY_AT), "decay": 0.1},
        }
        return validate_tables(Config, tables, "angular")

    def states(self, epochs: Sequence[int]) -> list[Path]:
        """The files of its states, which are made where they are not there."""
        states = make_states(self._config(epochs), "angular", self.folder / self.name)
        return [states.path(f"epoch-{epoch}") for epoch in epochs]

    def network(self, epoch: int, mode: str) -> nn.Module:
        """After `epoch` epochs, its BatchNorm layers in `mode`."""
        network = self.experiment.new_model()
        load_state(network, load_file(self.states([epoch])[0]))
        return network.train(mode == "train")

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Test images in [0, 1], in model units, and their labels; the same for all networks."""
        test = self.experiment.dataset.test
        order = torch.randperm(len(test), generator=generator(SEED, "angular batches"))
        index = order[number * BATCH : (number + 1) * BATCH]
        inputs = test.inputs(index)
        return inputs, self.experiment.data.to_model(inputs), test.labels[index]


@dataclass(frozen=True)
class Client:
    """Who computes one gradient of one batch in one mode.

    Attributes:
        network: in that mode.
        images: `example channel height width` in [0, 1].
        inputs: the same in model units.
    """

    trained: Trained
    mode: str
    network: nn.Module
    images: Tensor
    inputs: Tensor
    labels: Tensor

    def update(self) -> Update:
        """Its gradient, and its batch's statistics in place of the running ones."""
        before = copy_state(self.network)  # before a forward pass in train mode changes the running statistics
        before = {name: tensor.clone() for name, tensor in before.items()}
        named = dict(self.network.named_parameters())
        statistics, remove = noting_statistics(self.network)
        loss = self.trained.experiment.loss(self.network(self.inputs), self.labels)
        remove()
        slopes = torch.autograd.grad(loss, list(named.values()))
        sent = Payload.from_dense(dict(zip(named, slopes, strict=True)), "gradient")
        payload = sent | Payload.from_dense(statistics, "weights")
        return Update(round=1, client=0, before=before, payload=payload, num_examples=len(self.labels))

    def knowledge(self) -> Knowledge:
        """All but the images themselves."""
        data = self.trained.experiment.data
        mean, std = data.moments()
        return Knowledge(
            model=self.trained.experiment.new_model,
            loss=self.trained.experiment.loss,
            input_shape=data.dataset.task.input_shape,
            num_classes=data.dataset.num_classes,
            value_range=data.value_range(),
            input_mean=mean,
            input_std=std,
            labels=self.labels,
        )

    def attacked(self, number: int) -> dict[str, float]:
        """How close the attack comes, and how far its loss falls."""
        attack = Matching(by_batch=self.mode == "train", iterations=ITERATIONS)
        rng = generator(SEED, "angular attack", number)  # the same start for all networks and states
        with use_one_thread():
            found = attack.invert(self.update(), self.knowledge(), rng, lambda *_: None)
        drops = {
            f"{name} {when}": float(found.trace[key][place])
            for name, key in (("distance", "l_sim"), ("objective", "objective"))
            for when, place in (("before", 0), ("after", -1))
        }
        return self.scores(found.data) | drops

    def scores(self, claimed: Tensor) -> dict[str, float]:
        """Means over the images, each paired with one of those claimed in [0, 1]."""
        claimed = metrics.pair_examples(claimed, self.images)
        perceived = lpips_distances(claimed, self.images, Path(os.environ["FEDSIM_DATA"]) / "weights")
        if isinstance(perceived, str):
            raise SystemExit(f"LPIPS: {perceived}")
        std = torch.tensor(self.trained.experiment.data.moments()[1]).reshape(-1, 1, 1)
        to_model = self.trained.experiment.data.to_model
        close = {
            "mse": ((to_model(claimed) - self.inputs) / std).square().mean(),
            "pixel mse": metrics.mse(claimed, self.images),
            "psnr": metrics.psnr(claimed, self.images),
            "lpips": perceived,
        }
        return {name: float(value.mean()) for name, value in close.items()}

    def compute_measure(self, label: str) -> dict[str, float]:
        """The values of one measure, by name."""
        loss = self.trained.experiment.loss
        found = MEASURES[label]().compute(self.network, loss, self.inputs, self.labels)
        return {f"{label}.{name}".removeprefix("."): value for name, value in found.items()}


def noting_statistics(network: nn.Module) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Mean and variance of what enters each BatchNorm layer in the next forward pass, and what ends the noting."""
    statistics: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs = given[0].detach()
            statistics[f"{name}.running_mean"] = inputs.mean((0, 2, 3))
            statistics[f"{name}.running_var"] = inputs.var((0, 2, 3), unbiased=False)

        return hook

    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    return statistics, lambda: [hook.remove() for hook in hooks] and None


def train(chosen: argparse.Namespace) -> None:
    """All states that are not there."""
    for name in chosen.models:
        print(*Trained(name, chosen.folder).states(chosen.epochs), sep="\n", flush=True)


def attack(chosen: argparse.Namespace) -> None:
    """The quality of each batch's reconstruction."""
    done = {tuple(row[name] for name in CELL) for row in read(QUALITY)}
    for key, client in clients(chosen):
        if tuple(map(str, key)) not in done:
            try:
                found = client().attacked(key[-1])
            except AttackError as error:
                print(f"{key}: {error}", flush=True)
                continue
            append(QUALITY, QUALITY_COLUMNS, [dict(zip(CELL, key, strict=True)) | short(found)])


def measure(chosen: argparse.Namespace) -> None:
    """What each measure says of each batch."""
    done = {(*(row[name] for name in CELL), row["measure"].split(".")[0]) for row in read(MEASURED)}
    for label in MEASURES:
        for key, client in clients(chosen):
            blind = label == "expected-error" and client().mode == "train"  # which it refuses
            if (*map(str, key), label or "lipschitz") not in done and not blind:
                found = short(client().compute_measure(label))
                about = dict(zip(CELL, key, strict=True))
                append(MEASURED, MEASURED_COLUMNS, [about | {"measure": m, "value": v} for m, v in found.items()])


def floors(chosen: argparse.Namespace) -> None:
    """What those score who have seen no gradient: the mean colour of the data, and noise."""
    for batch in chosen.batches:
        trained = Trained(chosen.models[0], chosen.folder)
        client = Client(trained, "eval", trained.network(0, "eval"), *trained.batch(batch))
        mean = torch.as_tensor(trained.experiment.dataset.moments[0]).reshape(-1, 1, 1).expand(client.images.shape)
        noise = torch.rand(client.images.shape, generator=generator(SEED, "angular noise", batch))
        for name, claimed in (("mean colour", mean), ("noise", noise)):
            print(f"batch {batch}, {name}: {client.scores(claimed.contiguous())}", flush=True)


def clients(chosen: argparse.Namespace) -> Iterator[tuple[tuple[str, int, str, int], Callable[[], Client]]]:
    """Each cell with what makes its client; one batch in all cells before the next."""
    trained = {name: Trained(name, chosen.folder) for name in chosen.models}
    for batch, epoch, name, mode in product(chosen.batches, chosen.epochs, chosen.models, MODES):

        def client(batch: int = batch, epoch: int = epoch, by: Trained = trained[name], mode: str = mode) -> Client:
            return Client(by, mode, by.network(epoch, mode), *by.batch(batch))

        yield (name, epoch, mode, batch), client
        print(f"batch {batch}, epoch {epoch}, {name}, {mode}: done", flush=True)


STAGES = {"train": train, "attack": attack, "measure": measure, "floors": floors}


def main() -> None:
    """Do one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--folder", type=Path, default=Path("runs/angular"), help="of the weights")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--epochs", nargs="*", type=int, default=list(EPOCHS), choices=EPOCHS)
    parser.add_argument("--batches", nargs="*", type=int, default=list(range(BATCHES)), help="numbers of batches")
    # The attack warns that returned statistics are not the running ones, which is what they are meant to be.
    chosen = begun(parser, "%(asctime)s %(message)s")
    STAGES[chosen.stage](chosen)


if __name__ == "__main__":
    main()
