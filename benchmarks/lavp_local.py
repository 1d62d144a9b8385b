"""What descent from beside the truth leaves of the matching loss, and which measure foresees that: LAVP's Table 4.

Each image starts five times from itself plus 0.1 times a random sign in each pixel. Plain gradient descent follows,
with one learning rate for all: half of what the steepest measured image allows. It needs what `lavp_study.py measure`
gives. `python benchmarks/lavp_local.py` takes ten minutes of one core for LeNet and CIFAR-10, keeps
benchmarks/results/lavp-local.csv, and prints Spearman's correlation of the mean final loss with each measure, and the
first three images as the paper shows them; `python benchmarks/kept_figures.py` keeps that table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import torch
from lavp_study import DISTANCES, RESULTS, SEED, Cell, append, begun, read, short
from lavp_tables import ByImage, correlated, measures
from torch import Tensor

from fedsim.base.randomness import generator

LOCAL, COLUMNS = RESULTS / "lavp-local.csv", ("data", "model", "image", "distance", "start", "first", "last")
OF = ("cifar10", "lenet")
STARTS, STEPS, AWAY, PICTURED = 5, 200, 0.1, 3
LARGEST = {"l2": "lavp-10.max", "cosine": "lavp-10.ang_max"}
TOLD = (
    "gradient-norm.norm", "lavp-10.max", "lavp-10.min", "lavp-10.ang_max", "lavp-10.ang_min",
    "expected-error-l2.error", "expected-error-l2.share", "expected-error-cosine.error", "expected-error-cosine.share",
)  # fmt: skip


def main() -> None:
    """Descend for the images that are not done, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", default="descend", choices=("descend",))
    parser.add_argument("--folder", type=Path, default=Path("runs/lavp"), help="of the weights")
    parser.add_argument("--images", type=int, default=50)
    chosen = begun(parser, "%(message)s")
    cell, measured = Cell(*OF, chosen.folder), measures()
    images = cell.images[: chosen.images]
    for distance, image in product(DISTANCES, images):
        done = {(row["image"], row["distance"]) for row in read(LOCAL)}
        steepest = max(measured[*OF, LARGEST[distance]].values())
        if (str(image), distance) not in done:
            append(LOCAL, COLUMNS, descended(cell, image, distance, 0.5 / steepest))
    for row in table(measured)[1]:
        print(" | ".join(row))


def descended(cell: Cell, image: int, distance: str, rate: float) -> list[dict[str, str]]:
    """A row for each start of one image: the matching loss before and after descent, of all model units at once.

    The loss is half the squared L2 distance, or one minus the cosine, as the measures take it.
    """
    _, truth, labels = cell.example(image)
    target = [slope.detach() for slope in slopes(cell, truth, labels)]
    norm = torch.stack([part.square().sum() for part in target]).sum().sqrt()
    target = [part / norm for part in target] if distance == "cosine" else target

    def loss(inputs: Tensor) -> Tensor:
        found = DISTANCES[distance](slopes(cell, inputs, labels), target)
        return found if distance == "cosine" else found / 2

    std = torch.tensor(cell.experiment.data.moments()[1]).reshape(1, -1, 1, 1)
    rows = []
    for start in range(STARTS):
        rng = generator(SEED, "lavp local", image, start)
        inputs = (truth + AWAY * torch.randn(truth.shape, generator=rng).sign() / std).requires_grad_()
        first = loss(inputs).item()
        for _ in range(STEPS):
            (slope,) = torch.autograd.grad(loss(inputs), inputs)
            inputs = (inputs - rate * slope).detach().requires_grad_()
        about = {"data": cell.data, "model": cell.model, "image": image, "distance": distance, "start": start}
        rows.append(about | short({"first": first, "last": loss(inputs).item()}))
    return rows


def slopes(cell: Cell, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient by the weights, as a function of the inputs."""
    loss = cell.experiment.loss(cell.network(inputs), labels)
    return list(torch.autograd.grad(loss, list(cell.network.parameters()), create_graph=True))


def table(measured: Mapping[tuple[str, str, str], ByImage]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: correlations with the mean final loss over starts, and the first images as the paper shows them.

    Args:
        measured: by data, model and measure, the value of each image.
    """
    finals = {distance: losses(distance) for distance in DISTANCES}
    images = list(finals["l2"])
    head = ["", *(f"with the final loss, {distance}" for distance in DISTANCES)]
    rows = []
    for name in TOLD:
        values = {image: measured[*OF, name][image] for image in images}
        means = [{image: float(np.mean(last)) for image, last in of.items()} for of in finals.values()]
        correlations = ["{:+.2f} ({:+.2f} to {:+.2f})".format(*correlated([(values, mean)])) for mean in means]
        rows.append([f"`{name}`", *correlations, *(f"{values[image]:.3g}" for image in images[:PICTURED])])
    for distance, of in finals.items():
        firsts = [f"{np.mean(of[image]):.3g} ± {np.std(of[image]):.2g}" for image in images[:PICTURED]]
        rows.append([f"final loss, {distance}", "", "", *firsts])
    return [*head, *(f"image {place + 1}" for place in range(PICTURED))], rows


def losses(distance: str) -> dict[str, list[float]]:
    """By image, the final loss of each start."""
    found: dict[str, list[float]] = {}
    for row in read(LOCAL):
        if row["distance"] == distance:
            found.setdefault(row["image"], []).append(float(row["last"]))
    return found


if __name__ == "__main__":
    main()
