"""Spearman's correlation of each measure with the quality of reconstructions, beside LAVP's Tables 1 to 3.

`python benchmarks/lavp_tables.py` takes about a minute, prints Markdown and draws docs/lavp.svg. The study that makes
the numbers is benchmarks/lavp_study.py.
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
PUBLISHED: Mapping[tuple[str, str], Mapping[str, tuple[float, float, float, float]]] = {
    ("cifar10", "l2"): {
        "grad_norm": (0.35, -0.27, -0.35, -0.13),
        "max": (0.51, -0.46, -0.51, -0.15),
        "min": (0.41, -0.40, -0.41, -0.20),
        "ang_max": (-0.06, -0.01, 0.06, -0.06),
        "ang_min": (-0.04, -0.07, 0.04, -0.06),
        "sqrt(max ang_min)": (0.48, -0.49, -0.48, -0.09),
    },
    ("cifar100", "l2"): {
        "grad_norm": (0.41, -0.31, -0.41, -0.19),
        "max": (0.46, -0.57, -0.46, 0.10),
        "min": (0.41, -0.45, -0.41, -0.01),
        "ang_max": (-0.05, -0.18, 0.05, 0.22),
        "ang_min": (-0.05, -0.20, 0.05, 0.19),
        "sqrt(max ang_min)": (0.50, -0.49, -0.50, -0.09),
    },
    ("cifar10", "cosine"): {
        "grad_norm": (-0.28, 0.25, 0.28, -0.18),
        "max": (-0.03, -0.02, 0.03, 0.00),
        "min": (0.04, -0.08, -0.04, 0.02),
        "ang_max": (0.26, -0.31, -0.26, 0.36),
        "ang_min": (0.64, -0.74, -0.64, 0.62),
        "sqrt(max ang_min)": (-0.28, 0.25, 0.28, -0.18),
    },
    ("cifar100", "cosine"): {
        "grad_norm": (0.10, -0.07, -0.10, 0.02),
        "max": (0.37, -0.35, -0.37, 0.26),
        "min": (0.32, -0.34, -0.32, 0.24),
        "ang_max": (0.67, -0.80, -0.67, 0.68),
        "ang_min": (0.69, -0.81, -0.69, 0.65),
        "sqrt(max ang_min)": (0.50, -0.45, -0.50, 0.36),
    },
    ("photographs", "l2"): {
        "grad_norm": (0.66, -0.66, -0.66, -0.28),
        "max": (0.69, -0.72, -0.69, -0.09),
        "min": (0.74, -0.74, -0.72, -0.07),
        "ang_max": (-0.05, 0.09, 0.05, 0.03),
        "ang_min": (-0.07, 0.12, 0.07, 0.10),
    },
    ("photographs", "cosine"): {
        "grad_norm": (-0.06, -0.04, 0.00, -0.05),
        "max": (0.02, -0.07, -0.11, 0.04),
        "min": (-0.03, -0.05, -0.06, 0.00),
        "ang_max": (0.27, -0.37, -0.21, 0.32),
        "ang_min": (0.26, -0.22, -0.24, 0.32),
    },
}
"""LAVP's Table 1, and Table 2 for the photographs; the last of each is from Table 3. With MSE, SSIM, PSNR and LPIPS.
The fusion's row for CIFAR-10 with cosine is printed as the gradient norm's of Table 1, where Table 3 has (-0.21, 0.25,
-0.21, 0.15) for the norm itself: one of the two columns is wrong."""
Numbers = NDArray[np.float64]
ByImage = Mapping[str, float]


def main() -> None:
    """A table for each data set and distance, then the picture."""
    quality, measured = qualities(), measures()
    for data in DATA:
        for distance in DISTANCES:
            if lines := table(data, distance, quality, measured):
                print("\n".join(lines), end="\n\n")
    draw(quality, measured)


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


def table(
    data: str,
    distance: str,
    quality: Mapping[tuple[str, str, str, str], ByImage],
    measured: Mapping[tuple[str, str, str], ByImage],
) -> list[str]:
    """A line for each measure: the mean correlation over networks, its 95 % interval, and LAVP's."""
    told = []
    for measure in dict.fromkeys(name for _, _, name in measured):
        sampled = [
            model
            for model in MODELS[data]
            if len(measured.get((data, model, measure), {}).keys() & quality[data, model, distance, SCORES[0]])
            >= FEWEST
        ]
        if not sampled:
            continue
        published, cells = PUBLISHED[data, distance].get(OURS.get(measure, "")), []
        for place, score in enumerate(SCORES):
            pairs = [(measured[data, model, measure], quality[data, model, distance, score]) for model in sampled]
            ours, low, high = correlated(pairs)
            theirs = f"; {published[place]:+.2f}" if published else ""
            cells.append(f"{ours:+.2f} ({low:+.2f} to {high:+.2f}){theirs}")
        title = f"`{measure}`{f', {OURS[measure]}' if measure in OURS else ''}"
        told.append(
            f"| {title}{'' if len(sampled) == len(MODELS[data]) else ', ' + ', '.join(sampled)} | {' | '.join(cells)} |"
        )
    counts = [len(quality.get((data, model, distance, SCORES[0]), ())) for model in MODELS[data]]
    title = f"{data}, {distance}: images of {', '.join(f'{m} {n}' for m, n in zip(MODELS[data], counts, strict=True))}"
    head = f"| measure | {' | '.join(score.upper() for score in SCORES)} |"
    return [title, "", head, f"|---|{'---|' * len(SCORES)}", *told] if told and any(counts) else []


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
    ranks = [rankdata(np.where(there, one, np.nan), axis=1, nan_policy="omit") for one in (some, others)]
    first, second = (one - np.nanmean(one, 1, keepdims=True) for one in ranks)
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
