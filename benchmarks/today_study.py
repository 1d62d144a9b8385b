"""What gradient inversion reads of photographs from ResNet18 and a small vision transformer, fresh and trained.

`nice -n 15 python benchmarks/today_study.py` trains what is not trained, then runs what is not done yet, the most
telling cells first, on one core, for `--minutes` at most, and keeps it in benchmarks/results/today.csv; data and the
weights of LPIPS come from FEDSIM_DATA. `--time` prints what one iteration of each kind of cell takes, and runs nothing.
`python benchmarks/today_tables.py` shows what was found.

A client holds `batch` test images, which no network has seen, the same for all networks and attacks; labels are
granted. It sends the gradient of all of them (`gradient`), or its weights after one epoch of four steps (`epoch`). Its
BatchNorm layers, if there are any, normalise by the running statistics (`frozen`), or by the batch, and then it sends
those statistics (`sent`) or not (`withheld`); the attack normalises likewise, and where there are four steps it
simulates them.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from resumed import go_on
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import fold

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.audit.evaluation.score import PublicExamples
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator, use_one_thread
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.training_states import make_states
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import BatchNormStatistics, TotalVariation
from fedsim.inversion.problem import InversionProblem, build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.update_models import GradientAtBroadcast, UnrolledTraining
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import running_statistics
from fedsim.training.settings import LocalTraining

RESULTS = Path(__file__).parent / "results" / "today.csv"
RUNS = Path("runs/today")
DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"name": "cifar10"},
    "photographs": {"name": "image-folder", "path": "imagenet-sample-224/val", "size": 64, "test_fraction": 0.5},
    "faces": {"name": "att-faces", "size": [64, 64], "test_images": 5},
}
"""CIFAR-10; 100 photographs of ImageNet, one a class, half of them public; of each of 40 people five faces and five."""
SIDES = {"cifar10": 32, "photographs": 64, "faces": 64}
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet18"},
    "resnet18/4": {"name": "resnet18", "channels": 16},
    "vit": {"name": "vit"},
}
"""`resnet18/4` has a quarter of ResNet18's channels, so that one core trains and attacks it."""
TRAINING: dict[str, dict[str, Any]] = {
    "resnet18/4": {"learning_rate": 0.05, "momentum": 0.9},
    "vit": {"optimizer": "adam", "learning_rate": 0.001},
}
PATCHES = 8
"""Of the transformer, along a side."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "cifar10": {"training": {"batch_size": 50}, "states": {"decay_at": [10, 14], "decay": 0.1}},
    "faces": {"training": {"batch_size": 20}, "states": {"decay_at": [20, 30], "decay": 0.1}},
}
"""Of the 10 000 and 200 training images that there are, on one core in minutes; nothing is trained on photographs."""
EPOCHS = {("cifar10", "early"): 4, ("cifar10", "trained"): 16, ("faces", "trained"): 40}
SEED, VICTIMS = 1, (1, 2, 3)
STEPS, RATE, PUBLIC, MOST = 4, 0.01, 500, 16
ITERATIONS, MANY = 300, 1000
HOW: dict[str, Any] = {"iterations": ITERATIONS, "step_size": 0.1, "signed": True, "tv_weight": 0.01}
BN_WEIGHT = 0.005
METRICS = ("psnr", "ssim", "lpips", "recovered")


@dataclass(frozen=True, kw_only=True)
class ByBatch(GradientInversion):
    """Inverting gradients with dummy data that are normalised by their batch, as the client's were.

    Weights after several steps are matched along these steps, which are simulated, since each normalises by its own
    mini-batch.

    Args:
        step_size: of Adam, which is fed signs, in standard deviations of the inputs.
        tv_weight: of the total variation.
        bn_weight: of the distance to the statistics that the client sent (GradAttack's strongest setting: 0.005); 0
            where it sent none.
    """

    step_size: float
    tv_weight: float
    bn_weight: float
    signed: bool = True

    def _recipe(self, scene: InversionProblem) -> Recipe:
        statistics = [(self.bn_weight, BatchNormStatistics(exact=True))] if self.bn_weight else []
        return Recipe(
            update_model=GradientAtBroadcast() if scene.steps == 1 else UnrolledTraining(),
            priors=[(self.tv_weight, TotalVariation()), *statistics],
            step_size=self.step_size,
            signed=self.signed,
            normalised_by_batch=True,
        )

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=True)


@dataclass(frozen=True)
class Positions:
    """Solves for the patches of the only image, by the gradients of a vision transformer's positions.

    Token t enters as W x_t + b + p_t, so that the gradient of p_t is some d_t and that of W is the sum of d_t x_t^T:
    for one image d_t is known, and the patches follow by least squares where the d_t are linearly independent. Of
    several images the positions' gradients are sums over them. Lu et al. 2022 (APRIL) read a first block without
    normalisation by its positions; this needs nothing of what comes after the embedding.
    """

    def invert(self, update: Update, knowledge: Knowledge, *_: object) -> Reconstruction:
        """The image.

        Raises:
            ValueError: there are several.
        """
        if update.num_examples != 1:
            raise ValueError(f"positions are read of one image, not of {update.num_examples}; use inverting-gradients")
        scene = build_problem(update, knowledge)
        gradient = dict(zip(scene.parameter_names, scene.direction, strict=True))
        tokens = gradient["tokens.positions"][0, 1:].double()
        patches = torch.linalg.lstsq(tokens.T, gradient["tokens.embedding.weight"].double()).solution
        assert knowledge.input_shape is not None
        assert knowledge.labels is not None
        channels, *sides = knowledge.input_shape
        patch = math.isqrt(patches.shape[1] // channels)
        images = fold(patches.T[None], tuple(sides), patch, stride=patch)
        units = scene.scaling
        return Reconstruction(
            data=((images - units.low) / (units.high - units.low)).clamp(0, 1).float(), labels=knowledge.labels
        )


ATTACKS: Mapping[str, GradientInversion | Positions] = {
    "inverting-gradients": InvertingGradients(**HOW),
    f"inverting-gradients-{MANY}": InvertingGradients(**HOW | {"iterations": MANY}),
    "sme": SurrogateModelExtension(**HOW),
    "by-batch": ByBatch(**HOW, bn_weight=0.0),
    "by-batch-and-statistics": ByBatch(**HOW, bn_weight=BN_WEIGHT),
    f"by-batch-and-statistics-{MANY}": ByBatch(**HOW | {"iterations": MANY}, bn_weight=BN_WEIGHT),
    "see-through-gradients": SeeThroughGradients(iterations=ITERATIONS, restarts=1, exact_statistics=True),
    "positions": Positions(),
}


@dataclass(frozen=True)
class Cell:
    """One attack on one victim.

    Attributes:
        data: of `DATA`.
        batch: N.
        training: `gradient` or `epoch`.
        weights: `fresh`, `early` in training, or `trained`.
        statistics: of BatchNorm: `none` in the model, `frozen`, `withheld` or `sent`.
        seed: number of the victim.
    """

    model: str
    data: str
    batch: int
    training: str
    weights: str
    statistics: str
    attack: str
    seed: int


COLUMNS = (
    *(field.name for field in fields(Cell)),
    *METRICS,
    *(f"{name}_floor" for name in METRICS),
    "psnr_public",
    "best",
    "distance",
    "seconds",
)
BOTH, WEIGHTS = ("fresh", "trained"), ("fresh", "early", "trained")


def cells() -> Iterator[Cell]:
    """All of them, one gradient before epochs, few images before many, in each setting the victims by their numbers."""
    first, *_ = VICTIMS
    yield Cell("resnet18/4", "cifar10", 1, "gradient", "fresh", "frozen", f"inverting-gradients-{MANY}", first)
    for data, weights in (*product(("cifar10", "faces"), BOTH), ("photographs", "fresh")):
        for batch, seed in product((1, 4), VICTIMS):
            yield from of_resnet(data, batch, weights, seed)
            yield from of_vit(data, batch, weights, seed)
    for batch, seed in product((1, 4), VICTIMS):
        yield from of_resnet("cifar10", batch, "early", seed)
    for data, seed in product(("cifar10", "faces"), VICTIMS):
        yield from epochs(data, 4, seed)
    for weights in BOTH:
        yield Cell("resnet18/4", "cifar10", 1, "gradient", weights, "sent", f"by-batch-and-statistics-{MANY}", first)
    for seed in VICTIMS:
        yield Cell("resnet18", "cifar10", 1, "gradient", "fresh", "frozen", "inverting-gradients", seed)
    for seed, weights in product(VICTIMS, BOTH):
        yield from of_resnet("cifar10", MOST, weights, seed)
        yield from of_vit("cifar10", MOST, weights, seed)
    for seed in VICTIMS:
        yield from epochs("cifar10", MOST, seed)


def of_resnet(data: str, batch: int, weights: str, seed: int) -> Iterator[Cell]:
    """One gradient, in each of the ways of BatchNorm; by GradInversion, too, where it is not dear."""
    for statistics, attack in (
        ("frozen", "inverting-gradients"),
        ("withheld", "by-batch"),
        ("sent", "by-batch-and-statistics"),
        ("sent", "see-through-gradients"),
    ):
        if attack != "see-through-gradients" or batch < MOST:
            yield Cell("resnet18/4", data, batch, "gradient", weights, statistics, attack, seed)


def of_vit(data: str, batch: int, weights: str, seed: int) -> Iterator[Cell]:
    """One gradient; that of one image is solved for as well."""
    yield Cell("vit", data, batch, "gradient", weights, "none", "inverting-gradients", seed)
    if batch == 1:
        yield Cell("vit", data, batch, "gradient", weights, "none", "positions", seed)


def epochs(data: str, batch: int, seed: int) -> Iterator[Cell]:
    """Weights after one epoch; that of one image would be a gradient."""
    for weights in BOTH:
        for attack in ("inverting-gradients", "sme"):
            yield Cell("resnet18/4", data, batch, "epoch", weights, "frozen", attack, seed)
            yield Cell("vit", data, batch, "epoch", weights, "none", attack, seed)
        yield Cell("resnet18/4", data, batch, "epoch", weights, "sent", "by-batch-and-statistics", seed)
        yield Cell("resnet18/4", data, batch, "epoch", weights, "sent", "see-through-gradients", seed)
        yield Cell("resnet18/4", data, batch, "epoch", weights, "withheld", "by-batch", seed)


@cache
def experiment_of(model: str, data: str, epochs: int = 0) -> Experiment:
    """The data set, and a central training of so many epochs."""
    schedule = SCHEDULES.get(data, {})
    tables: dict[str, Any] = {
        "data": DATA[data],
        "model": MODELS[model] | ({"patch": SIDES[data] // PATCHES} if model == "vit" else {}),
        "training": {"local_epochs": 1, **TRAINING.get(model, {}), **schedule.get("training", {})},
        "federation": {"engine": "serial", "clients": 1, "rounds": 1, "seed": SEED},
        "states": schedule.get("states", {}) | ({"epochs": [epochs]} if epochs else {}),
    }
    return Experiment(validate_tables(Config, tables, "today"))


@cache
def weights_of(model: str, data: str, weights: str) -> State:
    """The state that is broadcast; trained ones are kept in `RUNS`."""
    if weights == "fresh":
        return experiment_of(model, data).initial_state()
    epochs = EPOCHS[data, weights]
    folder = RUNS / f"{model.replace('/', '-')}-{data}-{epochs}"
    states = make_states(experiment_of(model, data, epochs).config, "today", folder)
    return load_file(states.path(f"epoch-{epochs}"))


def held(data: str, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of a victim, in [0, 1], and their labels; those of a smaller batch are among those of a larger one."""
    test = experiment_of("vit", data).dataset.test
    order = torch.randperm(len(test), generator=generator(SEED, "today victims"))
    index = order[(seed - 1) * MOST :][:batch]
    return test.inputs(index), test.labels[index]


def message(cell: Cell) -> Update:
    """What the victim sends."""
    experiment = experiment_of(cell.model, cell.data)
    images, labels = held(cell.data, cell.batch, cell.seed)
    model, before = experiment.new_model(), dict(weights_of(cell.model, cell.data, cell.weights))
    steps: dict[str, Any] = (
        {"local_steps": 1, "sends": "gradient", "batch_size": cell.batch}
        if cell.training == "gradient"
        else {"local_epochs": 1, "batch_size": cell.batch // STEPS}
    )
    settings = LocalTraining(
        **steps,
        learning_rate=RATE,
        batch_norm="eval" if cell.statistics == "frozen" else "train",
        batch_norm_statistics="withheld" if cell.statistics == "withheld" else "shared",
    )
    if cell.statistics == "withheld":
        before = {name: tensor for name, tensor in before.items() if name not in running_statistics(model)}
    client = (model, before, experiment.data.to_model(images), labels, settings)
    if cell.training == "gradient":
        gradient, buffers, _ = local_gradient(*client, key=(cell.seed, "today"))
        payload = Payload.from_dense(gradient, "gradient") | Payload.from_dense(buffers, "weights")
    else:
        payload = Payload.from_dense(local_update(*client, key=(cell.seed, "today"))[0], "weights")
    return Update(round=1, client=cell.seed, before=before, payload=payload, num_examples=cell.batch)


def knowledge(cell: Cell) -> Knowledge:
    """All but the images themselves."""
    experiment = experiment_of(cell.model, cell.data)
    mean, std = experiment.data.moments()
    return Knowledge(
        model=experiment.new_model,
        loss=experiment.loss,
        input_shape=experiment.dataset.task.input_shape,
        num_classes=experiment.dataset.num_classes,
        value_range=experiment.data.value_range(),
        input_mean=mean,
        input_std=std,
        labels=held(cell.data, cell.batch, cell.seed)[1].sort().values,
        learning_rate=RATE,
        local_epochs=1,
        batch_size=cell.batch if cell.training == "gradient" else cell.batch // STEPS,
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        proximal_mu=0.0,
    )


def measure_cell(cell: Cell) -> dict[str, Any]:
    """A row; the claimed images are kept in `RUNS`."""
    update, known = message(cell), knowledge(cell)
    started = time.process_time()
    found = attacked(ATTACKS[cell.attack], cell, update, known)
    seconds = time.process_time() - started
    path = claim(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"data": found.data.contiguous()}, path)
    distance = float(found.trace["l_sim"][-1]) if "l_sim" in found.trace else math.nan
    return asdict(cell) | score_images(cell, found) | {"distance": distance, "seconds": seconds}


def attacked(attack: GradientInversion | Positions, cell: Cell, update: Update, known: Knowledge) -> Reconstruction:
    """What an attack claims; it starts with the same images for all networks."""
    with use_one_thread():
        return attack.invert(update, known, generator(SEED, "today attack", cell.seed), lambda *_: None)


def score_images(cell: Cell, found: Reconstruction) -> dict[str, float]:
    """Means over the images, and what guessing gets."""
    images, labels = held(cell.data, cell.batch, cell.seed)
    train = experiment_of(cell.model, cell.data).dataset.train
    scores = score_examples(
        found,
        Truth(data=images, labels=labels),
        public=PublicExamples(data=train.inputs(slice(0, PUBLIC)), labels=train.labels[:PUBLIC]),
        rng=generator(SEED, "today guesses", cell.seed),
        weights=Path(os.environ["FEDSIM_DATA"]) / "weights",
        labels_granted=True,
    )
    by = {one.metric: one for one in scores}
    about = {name: by[name].value for name in METRICS} | {f"{name}_floor": by[name].floor for name in METRICS}
    return about | {"psnr_public": by["psnr"].nearest_public, "best": max(by["psnr"].per_image)}


def claim(cell: Cell) -> Path:
    """Where the images are that an attack claimed."""
    return RUNS / "claims" / f"{'-'.join(map(str, asdict(cell).values())).replace('/', ':')}.safetensors"


def iteration(cell: Cell, count: int = 5) -> float:
    """CPU seconds of one, without those of the start."""
    attack = ATTACKS[cell.attack]
    assert isinstance(attack, GradientInversion)
    update, known, seconds = message(cell), knowledge(cell), []
    for iterations in (1, 1 + count):
        started = time.process_time()
        attacked(replace(attack, iterations=iterations), cell, update, known)
        seconds.append(time.process_time() - started)
    return (seconds[1] - seconds[0]) / count


def main() -> None:
    """Run what is not done yet, or time it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after so long")
    parser.add_argument("--time", action="store_true", help="time one iteration of each kind of cell, run nothing")
    chosen = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("fedsim").setLevel(logging.INFO)
    torch.set_num_threads(1)
    if chosen.time:
        for cell in cells():
            if cell.seed == VICTIMS[0] and cell.weights == "fresh" and cell.attack != "positions":
                print(*asdict(cell).values(), f"{iteration(cell):.3f} s an iteration", flush=True)
        return
    go_on(
        cells(),
        measure_cell,
        RESULTS,
        COLUMNS,
        chosen.minutes,
        rounded=lambda value: float(f"{value:.5g}"),
        told=(*(field.name for field in fields(Cell)), "psnr", "psnr_floor", "distance", "seconds"),
    )


if __name__ == "__main__":
    main()
