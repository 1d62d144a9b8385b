"""Which measure foresees how well gradient inversion goes: the study of LAVP (Hong et al. 2023), its Tables 1 to 3.

Three stages; each keeps what is done and goes on from it. `--data-dir DIR` or FEDSIM_DATA has CIFAR and the weights of
LPIPS; `--folder` gets the networks. `--models`, `--data` and `--images` choose a part.

    python benchmarks/lavp_study.py train      # the networks, about 25 minutes of one core
    python benchmarks/lavp_study.py attack     # benchmarks/results/lavp-quality.csv, several hours
    python benchmarks/lavp_study.py measure    # benchmarks/results/lavp-measures.csv

`python benchmarks/lavp_tables.py` shows what was found. `tune` is how step size and weight of the prior were chosen.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.audit.evaluation.perceptual_distance import lpips_distances
from fedsim.base import metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, use_one_thread
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.training_states import make_states
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.distances import Cosine, Distance, SquaredL2
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state, load_state

RESULTS = Path(__file__).parent / "results"
QUALITY, MEASURED = RESULTS / "lavp-quality.csv", RESULTS / "lavp-measures.csv"
SCORES = ("mse", "ssim", "psnr", "lpips")
QUALITY_COLUMNS = ("data", "model", "distance", "image", *SCORES, "objective")
MEASURED_COLUMNS = ("data", "model", "image", "measure", "value")
DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"name": "cifar10"},
    "cifar100": {"name": "cifar100"},
    "photographs": {"name": "image-folder", "path": "imagenet-sample-224/val", "size": 64, "test_fraction": 0.5},
}
"""The photographs are 100 of ImageNet, one a class, at 64 x 64: networks train on every second of them."""
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "alexnet": {"name": "alexnet", "stride": 2, "channels": [32, 96, 192, 128, 128], "hidden": [512, 512]},
    "vgg9": {"name": "vgg9", "batch_norm": True, "channels": [16, 32, 64, 64, 128, 128], "hidden": [256, 256]},
    "resnet8": {"name": "resnet8", "channels": [16, 32, 64], "pool": "global", "hidden": 0},
    "resnet18": {"name": "resnet18", "channels": 16, "stem": "imagenet"},
    "shufflenet": {"name": "shufflenet-v2", "width": 0.5},
}
"""LAVP names its networks and no more. AlexNet and VGG9 have half their usual channels, ResNet18 a quarter, so that
two cores can attack them, and VGG9 has batch norm, for the published learning rate of 0.1 is large for a network of
nine layers without."""
EPOCHS = {
    ("cifar10", "lenet"): 32,
    ("cifar10", "alexnet"): 16,
    ("cifar10", "vgg9"): 8,
    ("cifar10", "resnet8"): 8,
    ("cifar100", "lenet"): 40,
    ("cifar100", "alexnet"): 24,
    ("cifar100", "vgg9"): 12,
    ("cifar100", "resnet8"): 12,
    ("photographs", "resnet18"): 10,
    ("photographs", "shufflenet"): 10,
}
"""The networks of each data set. As many epochs as about 25 minutes of one core allow; the paper's are 300, on all
images. Ten on 50 photographs teach the networks little, but give batch norm its statistics."""
BATCH_SIZE = {"cifar10": 32, "cifar100": 32, "photographs": 10}
SEED, IMAGES, TUNED_ON, RESTARTS, ITERATIONS = 1, 100, 4, 3, 200
DISTANCES: Mapping[str, Distance] = {"l2": SquaredL2(), "cosine": Cosine()}
STEP_SIZES, TV_WEIGHTS = (0.03, 0.1), (1e-3, 0.1, 0.3, 1.0, 10.0, 100.0)
HOW = {"l2": {"step_size": 0.1, "tv_weight": 100.0}, "cosine": {"step_size": 0.1, "tv_weight": 0.3}}
"""Of each distance, by mean squared error on four images that are not in the study, of LeNet on CIFAR-10, in several
rounds of trying, never by a correlation. For L2 a weight of 1 was taken first, and raised when LeNet's first images in
the study came out hardly better than their start."""
SOME = {"exact": 0, "probes": 4, "steps": 40}
MEASURES: dict[str, dict[str, Any]] = {
    "gradient-norm": {"name": "gradient-norm"},
    "jacobian-norm": {"name": "jacobian-norm", "probes": 50},
    "sensitivity": {"name": "sensitivity"},
    "lipschitz": {"name": "lipschitz", "noises": 200},
    "angular-lipschitz": {"name": "angular-lipschitz", "noises": 200},
    "lavp": {"name": "lavp"},
    "lavp-10": {"name": "lavp", "steps": 10},
    "lavp-1000": {"name": "lavp", "steps": 1000},
    "expected-error-l2": {"name": "expected-error", "distance": "l2"},
    "expected-error-cosine": {"name": "expected-error", "distance": "cosine"},
    "spectrum-l2": {"name": "spectrum", "distance": "l2", **SOME},
    "spectrum-cosine": {"name": "spectrum", "distance": "cosine", **SOME},
}
"""By label, the tables of the measures; fewer noises and probes than by default, for two cores."""


@dataclass(frozen=True, kw_only=True)
class Matching(GradientInversion):
    """Gradient matching as LAVP's attack: Adam, total variation, pixels in their range.

    Adam is fed the sign of each slope, as in Geiping et al. 2020: on the four images that settings were tried on, the
    L2 distance hardly fell without.

    Args:
        distance: `l2` or `cosine`.
        step_size: of Adam, in standard deviations of the inputs, a tenth after 3/8, 5/8 and 7/8 of the way.
        tv_weight: of the total variation.
    """

    distance: str
    step_size: float
    tv_weight: float

    def _recipe(self, scene: InversionProblem) -> Recipe:
        prior = (self.tv_weight, TotalVariation())
        return Recipe(distance=DISTANCES[self.distance], priors=[prior], step_size=self.step_size, signed=True)


@dataclass(frozen=True)
class Cell:
    """A network that is trained on a data set.

    Attributes:
        folder: of all weights.
    """

    data: str
    model: str
    folder: Path = field(compare=False)

    @cached_property
    def experiment(self) -> Experiment:
        """Its central training is LAVP's: SGD from 0.1, a tenth of it after half and three quarters of the epochs."""
        epochs = EPOCHS[self.data, self.model]
        tables = {
            "data": DATA[self.data],
            "model": MODELS[self.model],
            "training": {"local_epochs": 1, "learning_rate": 0.1, "batch_size": BATCH_SIZE[self.data]},
            "federation": {"engine": "serial", "clients": 1, "rounds": 1, "seed": SEED},
            "states": {"epochs": [epochs], "decay_at": [epochs // 2, epochs * 3 // 4], "decay": 0.1},
        }
        return Experiment(validate_tables(Config, tables, self.data))

    @property
    def weights(self) -> Path:
        """The file of its trained state, which is made where it is not there."""
        states = make_states(self.experiment.config, self.data, self.folder / f"{self.data}-{self.model}")
        return states.path(f"epoch-{EPOCHS[self.data, self.model]}")

    @cached_property
    def network(self) -> nn.Module:
        """The trained network in evaluation mode."""
        from safetensors.torch import load_file

        network = self.experiment.new_model()
        load_state(network, load_file(self.weights))
        return network.eval()

    @cached_property
    def images(self) -> list[int]:
        """Places in the test set: those of the study, the same for all networks, and then those to tune on."""
        count = len(self.experiment.dataset.test)
        return torch.randperm(count, generator=generator(SEED, "lavp images"))[: IMAGES + TUNED_ON].tolist()

    def example(self, image: int) -> tuple[Tensor, Tensor, Tensor]:
        """One test image in [0, 1], in model units, and its label; a batch of one each."""
        test = self.experiment.dataset.test
        inputs = test.inputs(slice(image, image + 1))
        return inputs, self.experiment.data.to_model(inputs), test.labels[image : image + 1]

    def update(self, image: int) -> Update:
        """What a client sends that holds this image alone, and trains in evaluation mode."""
        _, inputs, labels = self.example(image)
        named = dict(self.network.named_parameters())
        slopes = torch.autograd.grad(self.experiment.loss(self.network(inputs), labels), list(named.values()))
        payload = Payload.from_dense(dict(zip(named, slopes, strict=True)), "gradient")
        return Update(round=1, client=image, before=copy_state(self.network), payload=payload, num_examples=1)

    def knowledge(self, image: int) -> Knowledge:
        """All but the image itself."""
        data = self.experiment.data
        mean, std = data.moments()
        return Knowledge(
            model=lambda: self.network,
            loss=self.experiment.loss,
            input_shape=data.dataset.task.input_shape,
            num_classes=data.dataset.num_classes,
            value_range=data.value_range(),
            input_mean=mean,
            input_std=std,
            labels=self.example(image)[2],
        )

    def attacked(self, image: int, attack: Matching) -> dict[str, float]:
        """How close the best of all restarts comes, by the objective; NaN where there is nothing to match."""
        rng = generator(SEED, "lavp attack", image)
        try:
            with use_one_thread():
                found = attack.invert(self.update(image), self.knowledge(image), rng, lambda *_: None)
        except AttackError as error:
            print(f"{self.data}, {self.model}: {error}", flush=True)
            return dict.fromkeys((*SCORES, "objective"), math.nan)
        return self.scores(image, found) | {"objective": float(found.trace["objective"][-1])}

    def scores(self, image: int, found: Reconstruction) -> dict[str, float]:
        """By each metric, against the original."""
        true = self.example(image)[0]
        perceived = lpips_distances(found.data, true, Path(os.environ["FEDSIM_DATA"]) / "weights")
        if isinstance(perceived, str):
            raise SystemExit(f"LPIPS: {perceived}")
        close = {name: getattr(metrics, name)(found.data, true) for name in ("mse", "ssim", "psnr")}
        return {name: float(value) for name, value in (close | {"lpips": perceived}).items()}


def train(cells: Sequence[Cell], chosen: argparse.Namespace) -> None:
    """All networks that are not there."""
    for cell in cells:
        print(cell.weights, flush=True)


def tune(cells: Sequence[Cell], chosen: argparse.Namespace) -> None:
    """Each setting on a few other images: mean of each score."""
    for cell, distance, step, weight in product(cells, DISTANCES, STEP_SIZES, TV_WEIGHTS):
        attack = attack_by(distance, step_size=step, tv_weight=weight)
        found = [cell.attacked(image, attack) for image in cell.images[IMAGES:]]
        means = ", ".join(f"{name} {sum(one[name] for one in found) / len(found):.4f}" for name in SCORES)
        print(f"{cell.data}, {cell.model}, {distance}, step {step}, TV {weight}: {means}", flush=True)


def attack(cells: Sequence[Cell], chosen: argparse.Namespace) -> None:
    """The quality of each image's reconstruction by each distance."""
    for cell, distance in product(cells, DISTANCES):
        done = {tuple(row[name] for name in QUALITY_COLUMNS[:4]) for row in read(QUALITY)}
        for image in cell.images[: chosen.images]:
            key = (cell.data, cell.model, distance, str(image))
            if key not in done:
                found = cell.attacked(image, attack_by(distance, **HOW[distance]))
                append(QUALITY, QUALITY_COLUMNS, [dict(zip(QUALITY_COLUMNS, key, strict=False)) | short(found)])
        print(f"{cell.data}, {cell.model}, {distance}: done", flush=True)


def attack_by(distance: str, step_size: float, tv_weight: float) -> Matching:
    """The attack with one of the distances."""
    return Matching(
        distance=distance, step_size=step_size, tv_weight=tv_weight, iterations=ITERATIONS, restarts=RESTARTS
    )


def measure(cells: Sequence[Cell], chosen: argparse.Namespace) -> None:
    """What each measure says of each image."""
    for cell, label in product(cells, chosen.measures):
        done = {(row["data"], row["model"], row["image"], row["measure"].split(".")[0]) for row in read(MEASURED)}
        for image in cell.images[: chosen.images]:
            key = (cell.data, cell.model, str(image), label)
            if key not in done:
                append(MEASURED, MEASURED_COLUMNS, measure_image(cell, image, label))
        print(f"{cell.data}, {cell.model}, {label}: done", flush=True)


def measure_image(cell: Cell, image: int, label: str) -> Iterator[dict[str, Any]]:
    """A row for each value of one measure."""
    table = dict(MEASURES[label])
    by = registry.build("measures", table.pop("name"), table, label)
    _, inputs, labels = cell.example(image)
    for name, value in by.of(cell.network, cell.experiment.loss, inputs, labels).items():
        about = {"data": cell.data, "model": cell.model, "image": image}
        yield about | {"measure": f"{label}.{name}"} | short({"value": value})


def short(values: Mapping[str, float]) -> dict[str, str]:
    """With seven digits."""
    return {name: f"{value:.7g}" for name, value in values.items()}


def read(path: Path) -> list[dict[str, str]]:
    """All rows that are there."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: Sequence[str], rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
    """Write further rows, at once."""
    found, new = list(rows), not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(found)


STAGES = {"train": train, "tune": tune, "attack": attack, "measure": measure}


def begun(parser: argparse.ArgumentParser, form: str) -> argparse.Namespace:
    """What was chosen on the command line, `--data-dir` too; one thread, and a log in `form` of training alone."""
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    chosen = parser.parse_args()
    if chosen.data_dir is None:
        parser.error("name the data folder by --data-dir or FEDSIM_DATA")
    os.environ["FEDSIM_DATA"] = str(chosen.data_dir)
    torch.set_num_threads(1)
    logging.basicConfig(format=form)
    logging.getLogger("fedsim").setLevel(logging.INFO if chosen.stage == "train" else logging.ERROR)
    return chosen


def main() -> None:
    """Do one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--folder", type=Path, default=Path("runs/lavp"), help="of the weights")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=DATA)
    parser.add_argument("--images", type=int, default=IMAGES, help="how many of the images, the first ones")
    parser.add_argument("--measures", nargs="*", default=list(MEASURES), choices=MEASURES, metavar="LABEL")
    # The attack warns of dropout layers for each image; here the client trains in evaluation mode.
    chosen = begun(parser, "%(message)s")
    named = [(data, model) for data, model in EPOCHS if data in chosen.data and model in chosen.models]
    STAGES[chosen.stage]([Cell(data, model, chosen.folder) for data, model in named], chosen)


if __name__ == "__main__":
    main()
