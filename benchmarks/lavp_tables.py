"""Spearman's correlation of each measure with the quality of reconstructions, for LAVP's Tables 1 to 3.

`python benchmarks/kept_figures.py && python docs/paper_pages.py` writes the tables, beside the paper's;
`python benchmarks/lavp_tables.py` draws docs/lavp.svg. The study that makes the numbers is benchmarks/lavp_study.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from lavp_study import DATA, DISTANCES, EPOCHS, MEASURED, QUALITY, SCORES, SEED, read
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.stats import rankdata

PICTURE = Path(__file__).parent.parent / "docs" / "lavp.svg"
MODELS = {data: [model for of, model in EPOCHS if of == data] for data in DATA}
PLOTTED = "cifar10"
COLOURS = dict(zip(MODELS[PLOTTED], ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))
RESAMPLED = 1000
OURS = {
    "gradient-norm.norm": "grad_norm",
    "lavp.max": "max",
    "lavp.min": "min",
    "lavp.ang_max": "ang_max",
    "lavp.ang_min": "ang_min",
    "lavp.fusion": "sqrt(max ang_min)",
}
"""What LAVP calls the measures that it has, too."""
ENERGY = "distance from the mean, no gradient"
"""What expected-error says where the gradient tells nothing: the mean square of the inputs."""
FEWEST = 20
"""Images of a network from which on a correlation says something."""
PICTURED = (*OURS, "expected-error-l2.error", "expected-error-cosine.error")
Numbers = NDArray[np.float64]
ByImage = Mapping[str, float]


def main() -> None:
    """Draw the picture."""
    draw(qualities(), measures())


def qualities() -> Mapping[tuple[str, str, str, str], ByImage]:
    """By data, model, distance and score, the value of each image that has one."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = defaultdict(dict)
    for row in read(QUALITY):
        for score in SCORES:
            keep(found[row["data"], row["model"], row["distance"], score], row["image"], row[score])
    return found


def measures() -> Mapping[tuple[str, str, str], ByImage]:
    """By data, model and measure, the value of each image that has one."""
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in read(MEASURED):
        keep(found[row["data"], row["model"], row["measure"]], row["image"], row["value"])
    for (data, model, measure), errors in list(found.items()):
        if measure == "expected-error-cosine.error":
            shares = found[data, model, "expected-error-cosine.share"]
            found[data, model, ENERGY] = {image: error / shares[image] for image, error in errors.items()}
    return found


def keep(found: dict[str, float], image: str, value: str) -> None:
    """NaN is no value."""
    if not math.isnan(float(value)):
        found[image] = float(value)


def figures(
    data: str,
    distance: str,
    quality: Mapping[tuple[str, str, str, str], ByImage],
    measured: Mapping[tuple[str, str, str], ByImage],
) -> dict[str, dict[str, dict[str, str]]]:
    """By the networks and the steps to the minimum, by measure and score, the mean correlation over these networks."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for measure in dict.fromkeys(name for of, _, name in measured if of == data):
        sampled = [
            model
            for model in MODELS[data]
            if len(measured.get((data, model, measure), {}).keys() & quality[data, model, distance, SCORES[0]])
            >= FEWEST
        ]
        if sampled:
            row, steps = named(measure)
            found.setdefault(f"{', '.join(sampled)}{steps}", {})[row] = {
                score: "{:+.2f} ({:+.2f} to {:+.2f})".format(
                    *correlated([(measured[data, of, measure], quality[data, of, distance, score]) for of in sampled])
                )
                for score in SCORES
            }
    return found


def named(measure: str) -> tuple[str, str]:
    """LAVP's name of a measure, or ours, and how many steps its minimum took."""
    label, _, quantity = measure.partition(".")
    kind, _, steps = label.partition("-")
    if kind != "lavp":
        return OURS.get(measure, measure), ""
    return OURS[f"lavp.{quantity}"], f"; {steps or 100} steps"


def correlated(pairs: Sequence[tuple[ByImage, ByImage]]) -> tuple[float, float, float]:
    """Spearman's within each network, averaged; and the interval, by drawing images anew, the same for all networks."""
    images = sorted(set().union(*(set(some) & set(others) for some, others in pairs)))
    values = np.array([[[one.get(image, np.nan) for image in images] for one in pair] for pair in pairs])
    drawn = np.random.default_rng(SEED).integers(len(images), size=(RESAMPLED, len(images)))
    rows = np.concatenate([np.arange(len(images))[None], drawn])
    means = np.mean([spearman(some[rows], others[rows]) for some, others in values], 0)
    low, high = np.nanquantile(means[1:], (0.025, 0.975))  # a draw of equal values alone has no correlation
    return float(means[0]), float(low), float(high)


def spearman(some: Numbers, others: Numbers) -> Numbers:
    """Of each row, leaving out what is NaN in either."""
    there = ~np.isnan(some) & ~np.isnan(others)
    ranks = [rankdata(np.where(there, one, np.inf), axis=1) for one in (some, others)]  # the others keep their ranks
    counted = [np.where(there, rank, np.nan) for rank in ranks]
    first, second = (one - np.nanmean(one, 1, keepdims=True) for one in counted)
    product = np.nansum(first * second, 1)
    return np.asarray(product / np.sqrt(np.nansum(first**2, 1) * np.nansum(second**2, 1)))


def draw(
    quality: Mapping[tuple[str, str, str, str], ByImage], measured: Mapping[tuple[str, str, str], ByImage]
) -> None:
    """Measures against the MSE, CIFAR-10, as the paper's Fig. 2."""
    names = [name for name in PICTURED if any(name == measure for _, _, measure in measured)]
    if not names:
        return
    mpl.rcParams["svg.hashsalt"] = "fedsim"
    size = (2.2 * len(names), 2.2 * len(DISTANCES))
    figure, axes = plt.subplots(len(DISTANCES), len(names), figsize=size, squeeze=False, sharey="row", sharex="col")
    for line, distance in zip(axes, DISTANCES, strict=True):
        for axis, name in zip(line, names, strict=True):
            for model, colour in COLOURS.items():
                some, mse = measured.get((PLOTTED, model, name), {}), quality.get((PLOTTED, model, distance, "mse"), {})
                points(axis, some, mse, colour, model)
            axis.set(xscale="log", yscale="log")
        line[0].set_ylabel(f"MSE by {distance}")
    for axis, name in zip(axes[-1], names, strict=True):
        axis.set_xlabel(OURS.get(name, name), fontsize=7)
    axes[0][0].legend(fontsize=6, markerscale=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def points(axis: Axes, some: ByImage, mse: ByImage, colour: str, model: str) -> None:
    """One network's images."""
    images: Iterable[str] = [image for image in some if image in mse and some[image] > 0]
    axis.scatter([some[i] for i in images], [mse[i] for i in images], s=3, color=colour, label=model, linewidths=0)


if __name__ == "__main__":
    main()
