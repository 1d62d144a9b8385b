"""The picture of who holds what: a row a client, how its labels spread, how much it has, what it looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError
from fedsim.files import in_one_step
from fedsim.reporting.figures import DPI, style
from fedsim.reporting.holdings import Holdings, plain

Numbers = NDArray[np.float64]

_INK = "#333333"
_TRAIN, _HELD_OUT = style(0).colour, style(4).colour
_NAMED, _BINS, _SHOWN = 40, 60, 10
"""The most clients with a name beside their row; bins of a histogram; examples of a client in the strip."""
_SQUARE, _TITLES, _FRAME = 0.44, 0.9, 2.0
"""Inches: side of an image in the strip; what titles take of the height; what names of axes and the colour bar do."""


def draw(holdings: Holdings) -> Figure:
    """Clients x classes (of a regression: x targets), examples a client, and images where there are any."""
    images = holdings.dataset.task.kind == "image"
    rows = len(holdings.clients)
    height = min(8.5, max(3.6, _FRAME + 0.24 * rows))
    width = 11.5 if images else 7.5
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    ratios = [3.2, 1.3, 3.4] if images else [3.2, 1.3]
    grid = figure.add_gridspec(1, len(ratios), width_ratios=ratios)
    spread = figure.add_subplot(grid[0])
    sizes = figure.add_subplot(grid[1], sharey=spread)
    draw_labels = _draw_classes if holdings.dataset.num_classes else _draw_targets
    draw_labels(figure, spread, holdings)
    _name_clients(spread, holdings)
    _draw_sizes(sizes, holdings)
    if images:
        _draw_images(figure.add_subplot(grid[2]), holdings, height - _TITLES)
    partition, clients = holdings.config.partition.name, f"{rows} clients" if rows > 1 else "1 client"
    figure.suptitle(f"{holdings.dataset.name}, partition {partition}, {clients}", color=_INK, fontsize=11)
    return figure


def draw_to(path: Path, holdings: Holdings) -> None:
    """Write the picture to `path`, a PNG, and make its folder.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_one_step(path) as temporary:
            draw(holdings).savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}); name another file") from error


def _draw_classes(figure: Figure, axes: Axes, holdings: Holdings) -> None:
    """Which part of each client's examples lies in which class."""
    counts, classes = holdings.counts, holdings.dataset.num_classes
    shares = 100 * counts / counts.sum(1, keepdims=True)
    _draw_shares(figure, axes, shares, (-0.5, classes - 0.5))
    axes.set_xlabel("class", color=_INK)
    _name_classes(axes, holdings.dataset)
    if len(shares) <= 25 and classes <= 12:
        _write_counts(axes, counts, shares)


def _draw_targets(figure: Figure, axes: Axes, holdings: Holdings) -> None:
    """A histogram of each client's targets in the same bins; of many clients in shades."""
    targets = [holdings.targets(one.all) for one in holdings.clients]
    edges = np.histogram_bin_edges(np.concatenate(targets), _BINS)
    counts = np.stack([np.histogram(own, edges)[0] for own in targets])
    axes.set_xlabel("target", color=_INK)
    if len(targets) > _NAMED:
        shares = 100 * counts / counts.sum(1, keepdims=True)
        _draw_shares(figure, axes, shares, (float(edges[0]), float(edges[-1])))
        return
    for row, own in enumerate(counts):
        floor = row + 0.45
        axes.stairs(floor - 0.85 * own / own.max(), edges, baseline=floor, fill=True, color=_TRAIN)
        axes.axhline(floor, color=_INK, linewidth=0.5)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(targets) - 0.5, -0.5)
    axes.set_title("targets of each client; its fullest bin has full height", color=_INK, fontsize=9)


def _draw_shares(figure: Figure, axes: Axes, shares: Numbers, ends: tuple[float, float]) -> None:
    """`client bin` percentages as shades, and what the shades mean."""
    most = float(np.quantile(shares, 0.998, method="higher"))  # a client of a few examples is not to pale all others
    drawn = axes.imshow(
        shares,
        cmap="Blues",
        vmin=0,
        vmax=most,
        aspect="auto",
        extent=(*ends, len(shares) - 0.5, -0.5),
        interpolation="nearest",  # any other would smear classes into each other
    )
    more = "max" if shares.max() > most else "neither"
    bar = figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.8, aspect=40, pad=0.02, extend=more)
    bar.set_label("share of the client's examples (%)", color=_INK, fontsize=8.5)
    bar.ax.tick_params(colors=_INK, labelsize=8)
    bar.outline.set_visible(False)


def _name_clients(axes: Axes, holdings: Holdings) -> None:
    clients = holdings.clients
    axes.set_ylabel("client", color=_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    if len(clients) <= _NAMED:
        axes.set_yticks(range(len(clients)), [_label(holdings, client) for client in range(len(clients))])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    for spine in axes.spines.values():
        spine.set_color(_INK)


def _label(holdings: Holdings, client: int) -> str:
    """Id and natural group, if that is called otherwise."""
    group = holdings.clients[client].group
    return str(client) if group in ("", str(client)) else f"{client} ({_short(group)})"


def _name_classes(axes: Axes, dataset: Dataset) -> None:
    names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    if len(names) > _NAMED:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        return
    longest = max(map(len, map(plain, names)))
    rotation = 0 if longest * len(names) <= 45 else 90
    size = 8 if len(names) <= 26 else 6.5
    axes.set_xticks(range(len(names)), [_short(name) for name in names], rotation=rotation, fontsize=size)


def _write_counts(axes: Axes, counts: NDArray[np.int64], shares: Numbers) -> None:
    """The number of examples in each cell that is not empty."""
    for row, column in np.argwhere(counts):
        colour = "white" if shares[row, column] > 0.55 * shares.max() else _INK
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.5, color=colour)


def _draw_sizes(axes: Axes, holdings: Holdings) -> None:
    """How many examples each client has, those it trains on first."""
    train = np.array([len(one.train) for one in holdings.clients])
    held_out = np.array([len(one.held_out) for one in holdings.clients])
    rows = np.arange(len(train))
    if len(train) <= _NAMED:
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


def _draw_images(axes: Axes, holdings: Holdings, room: float) -> None:
    """Some training examples of some clients, from the first to the last; as many as fit into `room` inches."""
    _, height, width = holdings.dataset.task.input_shape
    chosen = _spread(holdings.data.clients, max(3, int(room * width / height / _SQUARE)))
    shown = [_images(holdings, holdings.clients[client].train) for client in chosen]
    gap = max(1, max(height, width) // 12)
    canvas = np.ones((len(shown) * (height + gap) - gap, _SHOWN * (width + gap) - gap, 3))
    for row, images in enumerate(shown):
        for column, image in enumerate(images):
            top, left = row * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = image
    axes.imshow(canvas, interpolation="nearest" if height < 64 else "antialiased")
    axes.set_yticks([row * (height + gap) + height / 2 for row in range(len(shown))])
    axes.set_yticklabels([_label(holdings, int(client)) for client in chosen])
    axes.set_xticks([])
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.set_title("training examples of some clients", color=_INK, fontsize=9)
    axes.set_anchor("N")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _images(holdings: Holdings, index: NDArray[np.int64]) -> Numbers:
    """`example height width 3` in [0, 1]; other than three channels are shown as the grey of their mean."""
    inputs = holdings.dataset.train.inputs(torch.from_numpy(index[_spread(len(index), _SHOWN)]))
    inputs = holdings.dataset.in_unit_range(inputs)
    shown = inputs if inputs.shape[1] == 3 else inputs.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    array: Numbers = shown.permute(0, 2, 3, 1).double().clamp(0, 1).numpy()
    return array


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` places of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _short(name: str, most: int = 16) -> str:
    name = plain(name)
    cut = name if len(name) <= most else f"{name[: most - 1]}…"
    return cut.replace("$", r"\$")  # which would start a formula
