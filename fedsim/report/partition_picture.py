"""Picture of a partition: a row for each client with its label distribution, its number of examples and some images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedsim.base.errors import ConfigError
from fedsim.base.files import replace_atomically
from fedsim.data import Dataset
from fedsim.modalities import find_modality
from fedsim.report.figures import DPI, OKABE_ITO
from fedsim.report.partition_summary import PartitionSummary, printable_name

Numbers = NDArray[np.float64]

_INK = "#333333"
_TRAIN, _HELD_OUT = OKABE_ITO[0], OKABE_ITO[4]
_MAX_NAMES, _MAX_LETTERS, _BINS, _IMAGES_PER_CLIENT = 40, 16, 60, 10
"""Most clients or classes whose names are written; letters of a name; bins of a histogram; images of a client."""
_IMAGE_INCHES, _TITLE_INCHES, _FRAME_INCHES = 0.44, 0.9, 2.0
"""Side of an image; height of the titles; height of axis labels and colour bar together."""


def draw_partition(summary: PartitionSummary) -> Figure:
    """Draw clients x classes, labels or targets, the examples of each client, and images where there are any."""
    has_images = find_modality(summary.dataset.task.modality).shown_as == "images"
    rows = len(summary.clients)
    height = min(8.5, max(3.6, _FRAME_INCHES + 0.24 * rows))
    width = 11.5 if has_images else 7.5
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    ratios = [3.2, 1.3, 3.4] if has_images else [3.2, 1.3]
    grid = figure.add_gridspec(1, len(ratios), width_ratios=ratios)
    label_axes = figure.add_subplot(grid[0])
    size_axes = figure.add_subplot(grid[1], sharey=label_axes)
    draw_labels = _draw_targets if summary.dataset.task.goal == "numbers" else _draw_classes
    draw_labels(figure, label_axes, summary)
    _name_clients(label_axes, summary)
    _draw_sizes(size_axes, summary)
    if has_images:
        _draw_images(figure.add_subplot(grid[2]), summary, height - _TITLE_INCHES)
    partition, clients = summary.config.partition.name, f"{rows} clients" if rows > 1 else "1 client"
    figure.suptitle(f"{summary.dataset.name}, partition {partition}, {clients}", color=_INK, fontsize=11)
    return figure


def save_partition_picture(path: Path, summary: PartitionSummary) -> None:
    """Write the picture to `path`, a PNG, and make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            draw_partition(summary).savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error


def _draw_classes(figure: Figure, axes: Axes, summary: PartitionSummary) -> None:
    """Draw which share of each client's examples is of which class, or has which label."""
    counts, classes = summary.counts, summary.dataset.task.outputs
    shares = 100 * counts / np.array([[len(client.all_indices)] for client in summary.clients])
    _draw_shares(figure, axes, shares, (-0.5, classes - 0.5))
    kinds = {"labels": "label", "masks": "class of pixels, in masks that have it"}
    axes.set_xlabel(kinds.get(summary.dataset.task.goal, "class"), color=_INK)
    _name_classes(axes, summary.dataset)
    if len(shares) <= 25 and classes <= 12:
        _write_counts(axes, counts, shares)


def _draw_targets(figure: Figure, axes: Axes, summary: PartitionSummary) -> None:
    """Draw a histogram of each client's targets, all in the same bins; of many clients as shades."""
    targets = [summary.targets(client.all_indices) for client in summary.clients]
    targets = [values.ravel() for values in targets]
    edges = np.histogram_bin_edges(np.concatenate(targets), _BINS)
    counts = np.stack([np.histogram(values, edges)[0] for values in targets])
    axes.set_xlabel("target" if summary.dataset.num_targets == 1 else "target, any of the numbers", color=_INK)
    if len(targets) > _MAX_NAMES:
        shares = 100 * counts / counts.sum(1, keepdims=True)
        _draw_shares(figure, axes, shares, (float(edges[0]), float(edges[-1])))
        return
    for row, bin_counts in enumerate(counts):
        floor = row + 0.45
        heights = 0.85 * bin_counts / bin_counts.max()
        axes.stairs(floor - heights, edges, baseline=floor, fill=True, color=_TRAIN)
        axes.axhline(floor, color=_INK, linewidth=0.5)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(targets) - 0.5, -0.5)
    axes.set_title("targets of each client; its fullest bin has full height", color=_INK, fontsize=9)


def _draw_shares(figure: Figure, axes: Axes, shares: Numbers, ends: tuple[float, float]) -> None:
    """Draw percentages `client bin` as shades, with a colour bar."""
    # Not the largest share, so that a client with a few examples does not pale all others.
    darkest = float(np.quantile(shares, 0.998, method="higher"))
    image = axes.imshow(
        shares,
        cmap="Blues",
        vmin=0,
        vmax=darkest,
        aspect="auto",
        extent=(*ends, len(shares) - 0.5, -0.5),
        interpolation="nearest",  # any other would smear classes into each other
    )
    extension = "max" if shares.max() > darkest else "neither"
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.8, aspect=40, pad=0.02, extend=extension)
    bar.set_label("share of the client's examples (%)", color=_INK, fontsize=8.5)
    bar.ax.tick_params(colors=_INK, labelsize=8)
    bar.outline.set_visible(False)


def _name_clients(axes: Axes, summary: PartitionSummary) -> None:
    clients = summary.clients
    axes.set_ylabel("client", color=_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    if len(clients) <= _MAX_NAMES:
        axes.set_yticks(range(len(clients)), [_label(summary, client) for client in range(len(clients))])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    for spine in axes.spines.values():
        spine.set_color(_INK)


def _label(summary: PartitionSummary, client: int) -> str:
    """Return the number of a client, and its natural group where that is called otherwise."""
    group = summary.clients[client].group
    return str(client) if group in ("", str(client)) else f"{client} ({_cut_name(group)})"


def _name_classes(axes: Axes, dataset: Dataset) -> None:
    names = dataset.class_names or tuple(map(str, range(dataset.task.outputs)))
    if len(names) > _MAX_NAMES:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        return
    longest = max(map(len, map(printable_name, names)))
    rotation = 0 if longest * len(names) <= 45 else 90
    size = 8 if len(names) <= 26 else 6.5
    axes.set_xticks(range(len(names)), [_cut_name(name) for name in names], rotation=rotation, fontsize=size)


def _write_counts(axes: Axes, counts: NDArray[np.int64], shares: Numbers) -> None:
    """Write the number of examples into each cell that is not empty."""
    for row, column in np.argwhere(counts):
        colour = "white" if shares[row, column] > 0.55 * shares.max() else _INK
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.5, color=colour)


def _draw_sizes(axes: Axes, summary: PartitionSummary) -> None:
    """Draw how many examples each client has, those it trains on first."""
    train = np.array([len(client.train) for client in summary.clients])
    held_out = np.array([len(client.held_out) for client in summary.clients])
    rows = np.arange(len(train))
    if len(train) <= _MAX_NAMES:
        axes.barh(rows, train, 0.75, color=_TRAIN, label="train")
        axes.barh(rows, held_out, 0.75, train, color=_HELD_OUT, label="held out")
    else:  # bars without gaps, as one shape
        edges = np.arange(len(train) + 1) - 0.5
        for low, high, colour, label in (
            (np.zeros_like(train), train, _TRAIN, "train"),
            (train, train + held_out, _HELD_OUT, "held out"),
        ):
            axes.stairs(high, edges, baseline=low, orientation="horizontal", fill=True, color=colour, label=label)
    axes.set_xlabel("examples", color=_INK)
    axes.set_xlim(0, 1.03 * (train + held_out).max())
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.tick_params(colors=_INK, labelsize=8)
    axes.tick_params(axis="y", left=False, labelleft=False)
    if held_out.any():
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8, handlelength=1)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)


def _draw_images(axes: Axes, summary: PartitionSummary, room: float) -> None:
    """Draw training examples of some clients, from the first to the last; as many as fit into `room` inches."""
    _, height, width = summary.dataset.task.input_shape
    clients = _spaced_positions(summary.data.clients, max(3, int(room * width / height / _IMAGE_INCHES)))
    images_of_clients = [_images(summary, summary.clients[client].train) for client in clients]
    gap = max(1, max(height, width) // 12)
    rows = len(images_of_clients)
    canvas = np.ones((rows * (height + gap) - gap, _IMAGES_PER_CLIENT * (width + gap) - gap, 3))
    for row, images in enumerate(images_of_clients):
        for column, image in enumerate(images):
            top, left = row * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = image
    axes.imshow(canvas, interpolation="nearest" if height < 64 else "antialiased")
    axes.set_yticks([row * (height + gap) + height / 2 for row in range(rows)])
    axes.set_yticklabels([_label(summary, int(client)) for client in clients])
    axes.set_xticks([])
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.set_title("training examples of some clients", color=_INK, fontsize=9)
    axes.set_anchor("N")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _images(summary: PartitionSummary, index: NDArray[np.int64]) -> Numbers:
    """Return images `example height width 3` in [0, 1]; unless they have three channels, as the grey of their mean."""
    positions = _spaced_positions(len(index), _IMAGES_PER_CLIENT)
    inputs = summary.dataset.train.inputs(torch.from_numpy(index[positions]))
    inputs = summary.dataset.to_unit_range(inputs)
    rgb = inputs if inputs.shape[1] == 3 else inputs.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    array: Numbers = rgb.permute(0, 2, 3, 1).double().clamp(0, 1).numpy()
    return array


def _spaced_positions(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` positions out of `count`, evenly spaced, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _cut_name(name: str) -> str:
    """Cut a name to the length of a label, and escape what would start a formula."""
    name = printable_name(name)
    cut = name if len(name) <= _MAX_LETTERS else f"{name[: _MAX_LETTERS - 1]}…"
    return cut.replace("$", r"\$")
