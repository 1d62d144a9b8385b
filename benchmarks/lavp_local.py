"""What descent from beside the truth leaves of the matching loss, and which measure foresees that: LAVP's Table 4.

Each image starts five times from itself plus 0.1 times a random sign in each pixel. Plain gradient descent follows,
with one learning rate for all: half of what the steepest measured image allows. It needs what `lavp_study.py measure`
gives. `python benchmarks/lavp_local.py` takes ten minutes of one core for LeNet and CIFAR-10, keeps
benchmarks/results/lavp-local.csv, and prints Spearman's correlation of the mean final loss with each measure, and the
first three images as the paper shows them.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch
from lavp_study import DISTANCES, RESULTS, SEED, Cell, append, begun, read, short
from lavp_tables import correlated, measures
from torch import Tensor

from fedsim.randomness import generator

LOCAL, COLUMNS = RESULTS / "lavp-local.csv", ("data", "model", "image", "distance", "start", "first", "last")
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
    cell = Cell("cifar10", "lenet", chosen.folder)
    images = cell.images[: chosen.images]
    measured = {name: measures()[cell.data, cell.model, name] for name in TOLD}
    for distance, image in product(DISTANCES, images):
        done = {(row["image"], row["distance"]) for row in read(LOCAL)}
        steepest = max(measured[LARGEST[distance]].values())
        if (str(image), distance) not in done:
            append(LOCAL, COLUMNS, descended(cell, image, distance, 0.5 / steepest))
    told(cell, measured)


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
        values = []
        for _ in range(STEPS):
            value = loss(inputs)
            (slope,) = torch.autograd.grad(value, inputs)
            values.append(float(value))
            inputs = (inputs - rate * slope).detach().requires_grad_()
        about = {"data": cell.data, "model": cell.model, "image": image, "distance": distance, "start": start}
        rows.append(about | short({"first": values[0], "last": float(loss(inputs))}))
    return rows


def slopes(cell: Cell, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient by the weights, as a function of the inputs."""
    loss = cell.experiment.loss(cell.network(inputs), labels)
    return list(torch.autograd.grad(loss, list(cell.network.parameters()), create_graph=True))


def told(cell: Cell, measured: dict[str, dict[str, float]]) -> None:
    """Correlations with the mean final loss over starts, and the first images."""
    finals = {distance: means(distance) for distance in DISTANCES}
    print("| measure | final loss, l2 | final loss, cosine | " + " | ".join(f"image {n + 1}" for n in range(PICTURED)))
    print("|---|---|---|" + "---|" * PICTURED)
    for name, values in measured.items():
        cells = ["{:+.2f} ({:+.2f} to {:+.2f})".format(*correlated([(values, finals[d])])) for d in DISTANCES]
        first = [f"{values[str(image)]:.3g}" for image in cell.images[:PICTURED]]
        print(f"| `{name}` | {' | '.join([*cells, *first])} |")
    for distance in DISTANCES:
        losses = [[float(r["last"]) for r in read(LOCAL) if (r["image"], r["distance"]) == (str(i), distance)]
                  for i in cell.images[:PICTURED]]  # fmt: skip
        print(f"| final loss, {distance} | | | " + " | ".join(f"{np.mean(v):.3g} ± {np.std(v):.2g}" for v in losses))


def means(distance: str) -> dict[str, float]:
    """By image, the mean final loss over its starts."""
    found: dict[str, list[float]] = {}
    for row in read(LOCAL):
        if row["distance"] == distance:
            found.setdefault(row["image"], []).append(float(row["last"]))
    return {image: float(np.mean(values)) for image, values in found.items()}


if __name__ == "__main__":
    main()
