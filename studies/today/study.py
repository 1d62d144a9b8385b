"""One message of a client with photographs, attacked; the tables and pictures of docs/studies/inversion-today.md.

BatchNorm layers, if there are any, normalise by the running statistics (`frozen`), or by the batch, and then the client
sends those statistics (`sent`) or not (`withheld`); the attack normalises likewise, and simulates the four steps of an
epoch where each normalises by its own mini-batch. Labels are granted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import fold

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.audit.evaluation.statistics import confidence_interval, gains
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import BatchNormStatistics, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.update_models import GradientAtBroadcast, UnrolledTraining
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import running_statistics
from fedsim.training.settings import LocalTraining
from studies.messages import central_tables, data_folder, image_knowledge, invert_update, score_claim, trained_states
from studies.running import RUNS, Row
from studies.writing import DOCS, column_values, markdown_table, select_rows, set_style

DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"name": "cifar10"},
    "faces": {"name": "att-faces", "size": [64, 64], "test_images": 5},
    "photographs": {"name": "image-folder", "path": "imagenet-sample-224/val", "size": 64, "test_fraction": 0.5},
}
"""CIFAR-10; of each of 40 people five faces and five; 100 photographs of ImageNet, one a class, half of them public."""
SIDES = {"cifar10": 32, "faces": 64, "photographs": 64}
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
SCHEDULES: dict[str, tuple[int, list[int]]] = {"cifar10": (50, [10, 14]), "faces": (20, [20, 30])}
"""Batch size, and epochs after which the learning rate falls to a tenth; nothing is trained on photographs."""
EPOCHS = {("cifar10", "early"): 4, ("cifar10", "trained"): 16, ("faces", "trained"): 40}
SEED, PATCHES, STEPS, RATE, PUBLIC, MOST = 1, 8, 4, 0.01, 500, 16
SETTINGS: dict[str, Any] = {"iterations": 300, "step_size": 0.1, "signed": True, "tv_weight": 0.01}
BN_WEIGHT = 0.005
"""GradAttack's strongest setting."""
METRICS = ("psnr", "ssim", "lpips", "recovered")
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class BatchNormalisedInversion(GradientInversion):
    """Inverting gradients with dummy data that are normalised by their batch, as the client's were.

    Args:
        step_size: of Adam, which is fed signs, in standard deviations of the inputs.
        tv_weight: of the total variation.
        bn_weight: of the distance to the statistics that the client sent; 0 where it sent none.
    """

    step_size: float
    tv_weight: float
    bn_weight: float = 0.0
    signed: bool = True

    def _recipe(self, problem: InversionProblem) -> Recipe:
        statistics = [(self.bn_weight, BatchNormStatistics(exact=True))] if self.bn_weight else []
        return Recipe(
            update_model=GradientAtBroadcast() if problem.steps == 1 else UnrolledTraining(),
            priors=[(self.tv_weight, TotalVariation()), *statistics],
            step_size=self.step_size,
            signed=self.signed,
            normalised_by_batch=True,
        )

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=True)


@dataclass(frozen=True)
class PositionGradients:
    """Solves for the patches of the only image, by the gradients of a vision transformer's positions.

    Token t enters as W x_t + b + p_t, so that the gradient of p_t is some d_t and that of W is the sum of d_t x_t^T:
    for one image d_t is known, and the patches follow by least squares where the d_t are linearly independent. Of
    several images the positions' gradients are sums over them. Lu et al. 2022 (APRIL) read a first block without
    normalisation by its positions; this needs nothing of what comes after the embedding.
    """

    def invert(self, update: Update, knowledge: Knowledge, *_: object) -> Reconstruction:
        """Solve for the image.

        Raises:
            ValueError: there are several.
        """
        if update.num_examples != 1:
            raise ValueError(f"positions are read of one image, not of {update.num_examples}; use inverting-gradients")
        problem = build_problem(update, knowledge)
        gradient = dict(zip(problem.parameter_names, problem.direction, strict=True))
        tokens = gradient["tokens.positions"][0, 1:].double()
        patches = torch.linalg.lstsq(tokens.T, gradient["tokens.embedding.weight"].double()).solution
        assert knowledge.input_shape is not None
        assert knowledge.labels is not None
        channels, *sides = knowledge.input_shape
        patch = math.isqrt(patches.shape[1] // channels)
        images = fold(patches.T[None], tuple(sides), patch, stride=patch)
        low, high = problem.scaling.low, problem.scaling.high
        return Reconstruction(data=((images - low) / (high - low)).clamp(0, 1).float(), labels=knowledge.labels)


ATTACKS: Mapping[str, GradientInversion | PositionGradients] = {
    "inverting-gradients": InvertingGradients(**SETTINGS),
    "inverting-gradients-1000": InvertingGradients(**SETTINGS | {"iterations": 1000}),
    "sme": SurrogateModelExtension(**SETTINGS),
    "by-batch": BatchNormalisedInversion(**SETTINGS),
    "by-batch-and-statistics": BatchNormalisedInversion(**SETTINGS, bn_weight=BN_WEIGHT),
    "by-batch-and-statistics-1000": BatchNormalisedInversion(**SETTINGS | {"iterations": 1000}, bn_weight=BN_WEIGHT),
    "see-through-gradients": SeeThroughGradients(iterations=300, restarts=1, exact_statistics=True),
    "positions": PositionGradients(),
}


def applies(cell: Row) -> bool:
    """Return whether an attack is of such a message, and whether the study has it."""
    kinds = {
        "none": ("inverting-gradients", "positions", "sme"),
        "frozen": ("inverting-gradients", "inverting-gradients-1000", "sme"),
        "withheld": ("by-batch",),
        "sent": ("by-batch-and-statistics", "by-batch-and-statistics-1000", "see-through-gradients"),
    }
    data, weights, attack, batch = cell["data"], cell["weights"], cell["attack"], cell["batch"]
    return (
        attack in kinds[cell["statistics"]]
        and (cell["statistics"] == "none") == (cell["model"] == "vit")
        and (batch < MOST or (data == "cifar10" and weights != "early"))
        and (attack != "positions" or batch == 1)
        and (attack != "see-through-gradients" or cell["training"] == "epoch" or batch < MOST)
        and (attack != "inverting-gradients-1000" or weights == "fresh")
        and (weights == "fresh" or (data, weights) in EPOCHS)
    )


def tables_of(model: str, data: str) -> dict[str, Any]:
    """Return an experiment, and with [states] how the network is trained centrally."""
    batch_size, decay_at = SCHEDULES.get(data, (0, []))
    settings = TRAINING.get(model, {}) | ({"batch_size": batch_size} if batch_size else {})
    network = MODELS[model] | ({"patch": SIDES[data] // PATCHES} if model == "vit" else {})
    return central_tables(DATA[data], network, SEED, decay_at, **settings)


@cache
def experiment_of(model: str, data: str) -> Experiment:
    """Return the data set and the network."""
    return Experiment(validate_tables(Config, tables_of(model, data), "today"))


@cache
def weights_of(model: str, data: str, weights: str) -> State:
    """Return the state that is broadcast."""
    if weights == "fresh":
        return experiment_of(model, data).initial_state()
    epochs = EPOCHS[data, weights]
    name = f"{model.replace('/', '-')}-{data}-{epochs}"
    return trained_states("today", name, (epochs,), lambda: tables_of(model, data))[epochs]


def victims_images(data: str, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and labels; those of a smaller batch are among those of a larger one."""
    test = experiment_of("vit", data).dataset.test
    order = torch.randperm(len(test), generator=generator(SEED, "today victims"))
    index = order[(seed - 1) * MOST :][:batch]
    return test.inputs(index), test.labels[index]


def send_message(
    model: str, data: str, batch: int, training: str, weights: str, statistics: str, seed: int
) -> tuple[Update, Knowledge]:
    """Return what the victim sends, and all that is known but the images themselves."""
    experiment = experiment_of(model, data)
    images, labels = victims_images(data, batch, seed)
    network, before = experiment.new_model(), dict(weights_of(model, data, weights))
    if training == "gradient":
        steps: dict[str, Any] = {"local_steps": 1, "sends": "gradient", "batch_size": batch}
    else:
        steps = {"local_epochs": 1, "batch_size": batch // STEPS}
    settings = LocalTraining(
        **steps,
        learning_rate=RATE,
        batch_norm="eval" if statistics == "frozen" else "train",
        batch_norm_statistics="withheld" if statistics == "withheld" else "shared",
    )
    if statistics == "withheld":
        before = {name: tensor for name, tensor in before.items() if name not in running_statistics(network)}
    client = (network, before, experiment.data.to_model(images), labels, settings)
    if training == "gradient":
        gradient, buffers, _ = local_gradient(*client, key=(seed, "today"))
        payload = Payload.from_dense(gradient, "gradient") | Payload.from_dense(buffers, "weights")
    else:
        payload = Payload.from_dense(local_update(*client, key=(seed, "today"))[0], "weights")
    knowledge = image_knowledge(
        experiment, labels.sort().values, learning_rate=RATE, local_epochs=1, batch_size=steps["batch_size"],
        optimizer="sgd", momentum=0.0, weight_decay=0.0, proximal_mu=0.0,
    )  # fmt: skip
    return Update(round=1, client=seed, before=before, payload=payload, num_examples=batch), knowledge


def measure(**cell: Any) -> Row:
    """Attack one victim; the claimed images are kept for the pictures."""
    setting = {name: value for name, value in cell.items() if name != "attack"}
    update, knowledge = send_message(**setting)
    started = time.process_time()
    # The attack starts with the same images for all networks.
    rng = generator(SEED, "today attack", cell["seed"])
    finding = invert_update(ATTACKS[cell["attack"]], update, knowledge, rng)
    seconds = time.process_time() - started
    path = claim_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"data": finding.data.contiguous()}, path)
    distance = float(finding.trace["l_sim"][-1]) if "l_sim" in finding.trace else math.nan
    images, labels = victims_images(cell["data"], cell["batch"], cell["seed"])
    truth, rng = Truth(data=images, labels=labels), generator(SEED, "today guesses", cell["seed"])
    train = experiment_of(cell["model"], cell["data"]).dataset.train
    weights = data_folder() / "weights"
    scores = score_claim(finding, truth, rng, train, PUBLIC, weights=weights, labels_granted=True)
    row: Row = {name: scores[name].value for name in METRICS}
    row |= {f"{name}_floor": scores[name].floor for name in METRICS}
    row |= {"psnr_public": scores["psnr"].nearest_public, "best": max(scores["psnr"].per_image)}
    return row | {"distance": distance, "seconds": seconds}


def claim_path(cell: Mapping[str, Any]) -> Path:
    """Return where the images are that an attack claimed."""
    names = ("model", "data", "batch", "training", "weights", "statistics", "attack", "seed")
    name = "-".join(str(cell[column]) for column in names).replace("/", ":")
    return RUNS / "today" / "claims" / f"{name}.safetensors"


TITLES = {
    "cifar10": "CIFAR-10", "faces": "Faces", "photographs": "Photographs",
    "gradient": "gradient", "epoch": "weights, E = 1",
    "resnet18": "ResNet18", "resnet18/4": "ResNet18/4", "vit": "ViT",
    "none": "–", "frozen": "running", "withheld": "batch, withheld", "sent": "batch, sent",
    "by-batch": "`inverting-gradients`",
    "by-batch-and-statistics": "`inverting-gradients` + statistics",
    "by-batch-and-statistics-1000": "`inverting-gradients` + statistics, 1000 iterations",
    "inverting-gradients-1000": "`inverting-gradients`, 1000 iterations",
    "positions": "by positions",
}  # fmt: skip
SETTING = ("batch", "training", "model", "statistics", "attack")
SCORES = {"psnr": ".1f", "ssim": ".2f", "lpips": ".2f"}
FEWEST = 3
"""Victims from which on an interval is shown."""


def tables(rows: Rows) -> dict[str, str]:
    """Return a table for each data set, a line for each setting, a column for each state of the weights."""
    parts = []
    for data in DATA:
        of_data = select_rows(rows, data=data)
        states = [state for state in ("fresh", "early", "trained") if select_rows(of_data, weights=state)]
        head = ["N", "sent", "network", "BatchNorm", "attack", "victims", "guess", *states]
        parts.append(f"{TITLES[data]}, {SIDES[data]} x {SIDES[data]}:")
        parts.append(markdown_table(head, setting_lines(of_data, states)))
    return {"": "\n\n".join(parts)}


def setting_lines(rows: Rows, states: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines by N, then gradients before epochs, then by network and BatchNorm as titles list them."""
    order = [*TITLES]
    settings = {tuple(row[name] for name in SETTING) for row in rows}
    for setting in sorted(settings, key=lambda s: (int(s[0]), *map(order.index, s[1:4]), s[4])):
        same = select_rows(rows, **dict(zip(SETTING, setting, strict=True)))
        by_state = [select_rows(same, weights=state) for state in states]
        counts = dict.fromkeys(str(len(group)) for group in by_state if group)
        guesses = [f"{column_values(same, f'{name}_floor').mean():{form}}" for name, form in SCORES.items()]
        titles = [TITLES.get(name, f"`{name}`") for name in setting[1:]]
        yield [setting[0], *titles, ", ".join(counts), " / ".join(guesses), *map(format_scores, by_state)]


def format_scores(rows: Rows) -> str:
    """Format means over victims, and the distance that is left; the PSNR with its interval.

    Bold is what is beyond the best guess, as far as the interval of the gain tells; fewer than `FEWEST` victims have
    neither interval nor bold. `see-through-gradients` compares by another distance, which is not shown.
    """
    if not rows:
        return "–"
    texts = []
    for name, form in SCORES.items():
        values = column_values(rows, name)
        gain = gains(values, column_values(rows, f"{name}_floor"), higher_is_better=name != "lpips")
        text = f"{values.mean():{form}}"
        texts.append(f"**{text}**" if len(rows) >= FEWEST and confidence_interval(gain)[0] > 0 else text)
    if len(rows) >= FEWEST:
        low, high = confidence_interval(column_values(rows, "psnr"))
        texts[0] += f" ({low:.1f}, {high:.1f})"
    left = np.nan if rows[0]["attack"] == "see-through-gradients" else column_values(rows, "distance").mean()
    return " / ".join([*texts, "–" if np.isnan(left) else f"{left:.2g}"])


def draw(rows: Rows) -> None:
    """Draw both pictures, for which the study has to have run here."""
    for data, name in (("cifar10", "inversion-today.png"), ("faces", "inversion-today-faces.png")):
        draw_claims(data, DOCS / "pictures" / name)


SHOWN = {
    "running statistics": ("resnet18/4", "frozen", "inverting-gradients"),
    "batch's, withheld": ("resnet18/4", "withheld", "by-batch"),
    "batch's, sent": ("resnet18/4", "sent", "by-batch-and-statistics"),
    "matching": ("vit", "none", "inverting-gradients"),
    "by positions": ("vit", "none", "positions"),
}
PANELS = ((1, 1), (1, 2), (1, 3), (4, 1))
"""N and victim of the columns of a picture."""


def draw_claims(data: str, path: Path) -> None:
    """Draw what was held, and below what was claimed; nothing where an attack is not of so many images."""
    set_style(7)
    true = [victims_images(data, batch, seed)[0] for batch, seed in PANELS]
    lines: list[tuple[str, Sequence[Tensor | None]]] = [("held", true)]
    for weights in ("fresh", "trained"):
        for title, (model, statistics, attack) in SHOWN.items():
            about = {"model": model, "data": data, "training": "gradient", "weights": weights}
            claims: list[Tensor | None] = []
            for (batch, seed), images in zip(PANELS, true, strict=True):
                cell = about | {"batch": batch, "statistics": statistics, "attack": attack, "seed": seed}
                fits = attack != "positions" or batch == 1
                claims.append(metrics.pair_examples(load_file(claim_path(cell))["data"], images) if fits else None)
            lines.append((f"{TITLES[model]}, {weights},\n{title}", claims))
    count = sum(map(len, true))
    figure, axes = plt.subplots(len(lines), count, figsize=(8, 8 * len(lines) / (count + 2.2)), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for (title, shown), line in zip(lines, axes, strict=True):
        places = iter(line)
        for claimed, images in zip(shown, true, strict=True):
            for number, axis in enumerate(islice(places, len(images))):
                if claimed is not None:
                    axis.imshow(claimed[number].permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
                    if title != "held":
                        psnr = metrics.psnr(claimed[number : number + 1], images[number : number + 1]).item()
                        axis.set_title(f"{psnr:.1f} dB", pad=2)
        line[0].text(-0.1, 0.5, title, transform=line[0].transAxes, ha="right", va="center")
    axes[0][1].set_title("three victims with one image each")
    axes[0][4].set_title("one with four", loc="left")
    figure.subplots_adjust(left=0.22, right=0.99, top=0.97, bottom=0.01, wspace=0.08, hspace=0.25)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
