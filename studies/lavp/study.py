"""LAVP's networks and attack, which studies/lavp_measures and lavp_local read too; correlations and the picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from fedsim.base import metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.inversion.distances import Cosine, Distance, SquaredL2
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.training.model_state import copy_state, load_state
from studies.messages import (
    central_tables,
    gradient_update,
    image_knowledge,
    invert_update,
    mean_gradient,
    perceive_distances,
    trained_states,
)  # fmt: skip
from studies.running import STUDIES, Row, read_rows
from studies.writing import (
    draw_places,
    format_drawn,
    kept_details,
    kept_result,
    save_picture,
    set_style,
    spearman_of_rows,
)

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
    "cifar10": {"lenet": 32, "alexnet": 16, "vgg9": 8, "resnet8": 8},
    "cifar100": {"lenet": 40, "alexnet": 24, "vgg9": 12, "resnet8": 12},
    "photographs": {"resnet18": 10, "shufflenet": 10},
}
"""The networks of each data set. As many epochs as about 25 minutes of one core allow; the paper's are 300, on all
images. Ten on 50 photographs teach the networks little, but give batch norm its statistics."""
BATCH_SIZE = {"cifar10": 32, "cifar100": 32, "photographs": 10}
IMAGES = {"cifar10": 50, "cifar100": 25, "photographs": 20}
SEED, DRAWN, RESTARTS, ITERATIONS = 1, 104, 3, 200
DISTANCES: Mapping[str, Distance] = {"l2": SquaredL2(), "cosine": Cosine()}
TV_WEIGHTS = {"l2": 100.0, "cosine": 0.3}
"""By mean squared error on four images that are not in the study, of LeNet on CIFAR-10, never by a correlation."""
SCORES = ("mse", "ssim", "psnr", "lpips")
ByImage = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LavpMatching(GradientInversion):
    """Gradient matching as LAVP's attack: Adam, total variation, pixels in their range.

    Adam is fed the sign of each gradient, as in Geiping et al. 2020: on the four images that settings were tried on,
    the L2 distance hardly fell without.

    Args:
        distance: `l2` or `cosine`.
    """

    distance: str

    def _recipe(self, problem: InversionProblem) -> Recipe:
        prior = (TV_WEIGHTS[self.distance], TotalVariation())
        return Recipe(distance=DISTANCES[self.distance], priors=[prior], step_size=0.1, signed=True)


def read_tables(data: str, model: str) -> dict[str, Any]:
    """Return LAVP's central training: SGD from 0.1, a tenth of it after half and three quarters of the epochs."""
    epochs = EPOCHS[data][model]
    sgd = {"learning_rate": 0.1, "batch_size": BATCH_SIZE[data]}
    return central_tables(DATA[data], MODELS[model], SEED, [epochs // 2, epochs * 3 // 4], **sgd)


@cache
def experiment_of(data: str, model: str) -> Experiment:
    """Return the data set and the network."""
    return Experiment(validate_tables(Config, read_tables(data, model), data))


@cache
def trained_network(data: str, model: str) -> nn.Module:
    """Return the trained network in evaluation mode."""
    epochs = EPOCHS[data][model]
    states = trained_states("lavp", f"{data}-{model}", (epochs,), lambda: read_tables(data, model))
    network = experiment_of(data, model).new_model()
    load_state(network, states[epochs])
    return network.eval()


def study_images(data: str, model: str, number: int | None = None) -> list[int]:
    """Return places in the test set, the same for all networks; `number` of them in place of the study's."""
    count = len(experiment_of(data, model).dataset.test)
    order = torch.randperm(count, generator=generator(SEED, "lavp images"))[:DRAWN].tolist()
    return order[: number or (50 if (data, model) == ("cifar100", "lenet") else IMAGES[data])]


def example(data: str, model: str, image: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one test image in [0, 1], in model units, and its label; a batch of one each."""
    test = experiment_of(data, model).dataset.test
    inputs = test.inputs(slice(image, image + 1))
    return inputs, experiment_of(data, model).data.to_model(inputs), test.labels[image : image + 1]


def cells() -> Iterator[Row]:
    """Yield all images of each network and distance."""
    for data, models in EPOCHS.items():
        for model, distance in product(models, DISTANCES):
            for image in study_images(data, model):
                yield {"data": data, "model": model, "distance": distance, "image": image}


def measure(data: str, model: str, distance: str, image: int) -> Row:
    """Reconstruct one image; NaN where there is nothing to match."""
    network, experiment = trained_network(data, model), experiment_of(data, model)
    true, inputs, labels = example(data, model, image)
    update = gradient_update(copy_state(network), mean_gradient(network, inputs, labels, experiment.loss), 1)
    knowledge = image_knowledge(experiment, labels, model=lambda: network)
    attack = LavpMatching(distance=distance, iterations=ITERATIONS, restarts=RESTARTS)
    try:
        found = invert_update(attack, update, knowledge, generator(SEED, "lavp attack", image))
    except AttackError as error:
        print(f"{data}, {model}: {error}")
        return dict.fromkeys((*SCORES, "objective"), math.nan)
    row = {name: float(getattr(metrics, name)(found.data, true)) for name in ("mse", "ssim", "psnr")}
    return row | {
        "lpips": float(perceive_distances(found.data, true)),
        "objective": float(found.trace["objective"][-1]),
    }


# What follows from the rows.

TABLES = {"cifar10": "table1-cifar10", "cifar100": "table1-cifar100", "photographs": "table2"}
PAPER_NAMES = {
    "gradient-norm.norm": "grad_norm", "lavp.max": "max", "lavp.min": "min", "lavp.ang_max": "ang_max",
    "lavp.ang_min": "ang_min", "lavp.fusion": "sqrt(max ang_min)",
}  # fmt: skip
"""What LAVP calls the measures that it has, too."""
ENERGY = "distance from the mean, no gradient"
"""What expected-error says where the gradient tells nothing: the mean square of the inputs."""
TITLES = PAPER_NAMES | {"image.own-mean": "distance from its own mean colour, no gradient"}
HIDDEN = ("image.data-mean", "image.mean-image")
"""The distance from the mean again, in pixels."""
POOLED = "; pooled"
FEWEST, RESAMPLED = 20, 1000
"""Images of a network from which on a correlation says something."""
COMMAND = "export FEDSIM_DATA=DIR OMP_NUM_THREADS=1\npython -m studies lavp lavp_measures --only data={}"


def qualities() -> Mapping[tuple[str, str, str, str], ByImage]:
    """Return by data, model, distance and score the value of each image that has one."""
    values: dict[tuple[str, str, str, str], dict[str, float]] = defaultdict(dict)
    for row in read_rows(STUDIES / "lavp" / "results.csv"):
        for score in SCORES:
            if not math.isnan(float(row[score])):
                values[row["data"], row["model"], row["distance"], score][row["image"]] = float(row[score])
    return values


def measures() -> Mapping[tuple[str, str, str], ByImage]:
    """Return by data, model and measure the value of each image that has one."""
    values: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in read_rows(STUDIES / "lavp_measures" / "results.csv"):
        if not math.isnan(float(row["value"])):
            values[row["data"], row["model"], row["measure"]][row["image"]] = float(row["value"])
    for (data, model, measure), errors in list(values.items()):
        if measure == "expected-error-cosine.error":
            shares = values[data, model, "expected-error-cosine.share"]
            values[data, model, ENERGY] = {image: error / shares[image] for image, error in errors.items()}
    return values


def figures() -> dict[str, Any]:
    """Return our figures in the place of the paper's Tables 1 to 4."""
    quality, measured, kept = qualities(), measures(), []
    for data, distance in product(DATA, DISTANCES):
        counts = {model: len(quality.get((data, model, distance, "mse"), ())) for model in EPOCHS[data]}
        images = f"images reconstructed: {', '.join(f'{model} {count}' for model, count in counts.items())}."
        for name, rows in correlation_rows(data, distance, quality, measured).items():
            reading = (
                "over all of these networks at once" if POOLED in name else "within each of these networks, averaged"
            )
            note = f"Spearman's correlation {reading}; {images}"
            kept.append(kept_result(f"{TABLES[data]}-{distance}", name, COMMAND.format(data), rows, note))
    return {"paper": "lavp", "kept": kept, "details": own_tables(quality, measured)}


def own_tables(
    quality: Mapping[tuple[str, str, str, str], ByImage], measured: Mapping[tuple[str, str, str], ByImage]
) -> list[dict[str, Any]]:
    """Return the tables that the paper does not have."""
    from studies.lavp.controls import colour_table, partial_table
    from studies.lavp_local.study import difference_table, local_table
    from studies.lavp_prior.correlations import prior_tables

    command = "export FEDSIM_DATA=DIR OMP_NUM_THREADS=1 # after the above; ten minutes of one core\n"
    return [
        kept_details("local", f"{command}python -m studies lavp_local", *local_table(measured)),
        kept_details("local-difference", "", *difference_table(measured)),
        kept_details("colour", "", *colour_table(quality, measured)),
        kept_details("partial", "", *partial_table(quality, measured)),
        *(kept_details(name, command, *table) for name, command, table in prior_tables(measured)),
    ]


def correlation_rows(
    data: str, distance: str, quality: Mapping[Any, ByImage], measured: Mapping[tuple[str, str, str], ByImage]
) -> dict[str, dict[str, dict[str, str]]]:
    """Return by the networks and the steps to the minimum, by measure and score, the mean correlation over networks.

    Measures that the paper has, too, have a second result, of all networks at once.
    """
    from studies.lavp.controls import format_pooled

    found: dict[str, dict[str, dict[str, str]]] = {}
    for measure in dict.fromkeys(name for of, _, name in measured if of == data and name not in HIDDEN):
        sampled = []
        for model in EPOCHS[data]:
            both = measured.get((data, model, measure), {}).keys() & quality[data, model, distance, "mse"]
            if len(both) >= FEWEST:
                sampled.append(model)
        if sampled:
            row, steps = paper_name(measure)
            name = f"{', '.join(sampled)}{steps}"
            for score in SCORES:
                pairs = [(measured[data, model, measure], quality[data, model, distance, score]) for model in sampled]
                found.setdefault(name, {}).setdefault(row, {})[score] = format_correlation(pairs)
                if len(sampled) > 1 and row in PAPER_NAMES.values():
                    found.setdefault(f"{name}{POOLED}", {}).setdefault(row, {})[score] = format_pooled(pairs)
    return found


def paper_name(measure: str) -> tuple[str, str]:
    """Return LAVP's name of a measure, or ours, and how many steps its minimum took."""
    label, _, quantity = measure.partition(".")
    kind, _, steps = label.partition("-")
    if kind != "lavp":
        return TITLES.get(measure, measure), ""
    return PAPER_NAMES[f"lavp.{quantity}"], f"; {steps or 100} steps"


def format_correlation(pairs: Sequence[tuple[ByImage, ByImage]]) -> str:
    """Format Spearman's within each network, averaged, and the interval by drawing images anew, the same for all."""
    images = sorted(set().union(*(set(values) & set(others) for values, others in pairs)))
    values = np.array([[[by_image.get(image, np.nan) for image in images] for by_image in pair] for pair in pairs])
    drawn = draw_places(len(images), RESAMPLED, SEED)
    return format_drawn(np.mean([spearman_of_rows(first[drawn], second[drawn]) for first, second in values], 0))


def draw(rows: Sequence[Mapping[str, str]]) -> None:
    """Draw measures, those of LAVP after 10 steps, against the MSE, CIFAR-10, as the paper's Fig. 2."""
    set_style(8)
    quality, measured = qualities(), measures()
    titles = {name.replace("lavp.", "lavp-10."): title for name, title in PAPER_NAMES.items()}
    titles |= {f"expected-error-{distance}.error": f"expected-error, {distance}" for distance in DISTANCES}
    colours = dict(zip(EPOCHS["cifar10"], ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))
    figure, axes = plt.subplots(2 * len(DISTANCES), 4, figsize=(8.8, 8.8), sharey="row")
    for (distance, name), axis in zip(product(DISTANCES, titles), axes.flat, strict=True):
        for model, colour in colours.items():
            values = measured.get(("cifar10", model, name), {})
            mse = quality.get(("cifar10", model, distance, "mse"), {})
            images = [image for image in values if image in mse and values[image] > 0]
            x, y = [values[image] for image in images], [mse[image] for image in images]
            axis.scatter(x, y, s=6, color=colour, label=model, linewidths=0)
        axis.set(xscale="log", yscale="log", xlabel=titles[name])
        axis.minorticks_off()  # whose labels would overlap
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        if axis in axes[:, 0]:
            axis.set_ylabel(f"MSE by {distance}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(colours), frameon=False, markerscale=2)
    save_picture(figure, "lavp.svg", legend_height=0.03)
