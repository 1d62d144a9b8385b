"""Descent on the matching loss from beside the truth, after studies/lavp_measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.base.randomness import generator
from studies.lavp.controls import draw_partial
from studies.lavp.study import (
    DISTANCES,
    SEED,
    ByImage,
    example,
    experiment_of,
    format_correlation,
    measures,
    study_images,
    trained_network,
)  # fmt: skip
from studies.running import STUDIES, Row, read_rows
from studies.writing import format_drawn

OF = ("cifar10", "lenet")
STARTS, STEPS, AWAY, SHOWN = 5, 200, 0.1, 3
"""Starts, steps of each, how far a start is in standard deviations of the data, and images in the table."""
STEEPEST = {"l2": "lavp-10.max", "cosine": "lavp-10.ang_max"}
COMPARED = {
    "l2": ("lavp-10.min", "gradient-norm.norm", "lavp-10.max"),
    "cosine": ("lavp-10.ang_min", "gradient-norm.norm", "lavp-10.ang_max", "lavp-10.min"),
}
MEASURES = (
    "gradient-norm.norm", "lavp-10.max", "lavp-10.min", "lavp-10.ang_max", "lavp-10.ang_min",
    "expected-error-l2.error", "expected-error-l2.share", "expected-error-cosine.error", "expected-error-cosine.share",
)  # fmt: skip


def cells() -> Iterator[Row]:
    """Yield all images by each distance."""
    for distance in DISTANCES:
        for image in study_images(*OF):
            yield {"data": OF[0], "model": OF[1], "image": image, "distance": distance}


def measure(data: str, model: str, image: int, distance: str) -> list[Row]:
    """Return a row for each start: the matching loss before and after plain gradient descent.

    The loss is half the squared L2 distance, or one minus the cosine, as the measures take it. The learning rate is
    one for all images: half of what the steepest measured image allows. Inputs are standardised, so that a start is
    0.1 standard deviations of the data from the truth in each pixel.
    """
    rate = 0.5 / max(measures()[*OF, STEEPEST[distance]].values())
    _, truth, labels = example(data, model, image)
    network, experiment = trained_network(data, model), experiment_of(data, model)

    def gradient(inputs: Tensor) -> list[Tensor]:
        loss = experiment.loss(network(inputs), labels)
        return list(torch.autograd.grad(loss, list(network.parameters()), create_graph=True))

    target = [part.detach() for part in gradient(truth)]
    if distance == "cosine":
        norm = torch.stack([part.square().sum() for part in target]).sum().sqrt()
        target = [part / norm for part in target]

    def matching_loss(inputs: Tensor) -> Tensor:
        return DISTANCES[distance](gradient(inputs), target) / (1 if distance == "cosine" else 2)

    rows = []
    for start in range(STARTS):
        rng = generator(SEED, "lavp local", image, start)
        inputs = (truth + AWAY * torch.randn(truth.shape, generator=rng).sign()).requires_grad_()
        first = matching_loss(inputs).item()
        for _ in range(STEPS):
            (change,) = torch.autograd.grad(matching_loss(inputs), inputs)
            inputs = (inputs - rate * change).detach().requires_grad_()
        rows.append({"start": start, "first": first, "last": matching_loss(inputs).item()})
    return rows


def local_table(measured: Mapping[tuple[str, str, str], ByImage]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines: correlations with the mean final loss, and the first images as the paper shows them."""
    finals = read_finals()
    images = list(finals["l2"])
    lines = []
    for name in MEASURES:
        values = {image: measured[*OF, name][image] for image in images}
        correlations = []
        for by_image in finals.values():
            means = {image: float(np.mean(last)) for image, last in by_image.items()}
            correlations.append(format_correlation([(values, means)]))
        lines.append([f"`{name}`", *correlations, *(f"{values[image]:.3g}" for image in images[:SHOWN])])
    for distance, by_image in finals.items():
        firsts = [f"{np.mean(by_image[image]):.3g} ± {np.std(by_image[image]):.2g}" for image in images[:SHOWN]]
        lines.append([f"final loss, {distance}", "", "", *firsts])
    head = ["", *(f"with the final loss, {distance}" for distance in DISTANCES)]
    return [*head, *(f"image {place + 1}" for place in range(SHOWN))], lines


def difference_table(measured: Mapping[tuple[str, str, str], ByImage]) -> tuple[list[str], list[list[str]]]:
    """Return by how much the minimum of a distance correlates more with its final loss than other measures do."""
    lines = []
    for distance, by_image in read_finals().items():
        means = {image: float(np.mean(last)) for image, last in by_image.items()}
        first, *others = COMPARED[distance]
        of_first, *of_others = (draw_partial([(measured[*OF, name], means, ())]) for name in (first, *others))
        for other, drawn in zip(others, of_others, strict=True):
            lines.append([distance, f"`{first}`", f"`{other}`", format_drawn(of_first - drawn)])
    return ["final loss", "correlation of", "above that of", "by"], lines


def read_finals() -> dict[str, dict[str, list[float]]]:
    """Return by distance and image the final losses of all starts."""
    finals: dict[str, dict[str, list[float]]] = {distance: {} for distance in DISTANCES}
    for row in read_rows(STUDIES / "lavp_local" / "results.csv"):
        finals[row["distance"]].setdefault(row["image"], []).append(float(row["last"]))
    return finals
