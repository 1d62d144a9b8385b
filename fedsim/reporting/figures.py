"""From numbers to PNG bytes: curves and image sheets on white, in colours the colour-blind can tell apart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # Matplotlib is imported when something is drawn, so that no federation carries it while it trains
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
Curves = Mapping[str, tuple[Numbers, Numbers]]
"""What one finding brings: a name, e.g. `objective`, to `(iteration, value)`."""

DPI = 192
"""Two device pixels for each CSS pixel."""
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STROKES = ("solid", "dashed", "dotted")
_INK, _FAINT = "#333333", "#d9d9d9"
_CELL, _GAP, _TEXT, _MARGIN = 104, 10, 34, 200
"""Of an image sheet, in device pixels: largest side of an image, space around it, line of text, row names."""
_ACROSS, _HEADING = 1400, 56
"""Of a gallery, in device pixels: its width, and the height of a heading."""
_TRACES = {
    "objective": ("What the attack minimises", "objective (dimensionless)"),
    "distance": ("Its gradient-matching part", "distance"),
    "l_sim": ("Direction of the gradient against the update", "L_sim = 1 − cosine (dimensionless)"),
    "psnr": ("Closeness to the truth, known to the evaluator only", "mean PSNR (dB)"),
    "training_error": ("How far a learned mapping misses updates it has seen", "squared error / a constant's"),
    "validation_error": ("How far it misses updates held out from it", "squared error / a constant's"),
    "training_loss": ("Training a model on dummy data", "loss (mean over the dummy examples)"),
    "residual": ("What equal updates of clients leave of the sums unexplained", "norm / that of the sums"),
    "standard_error": ("Standard error of the claimed update", "standard error / norm of the update"),
    "alpha": ("Place of the surrogate: 1 broadcast state, 0 returned state", "α (dimensionless)"),
}


@dataclass(frozen=True)
class Style:
    """How one attack is drawn everywhere in a report; the names are those of CSS, too."""

    colour: str
    stroke: str


def style(place: int) -> Style:
    """The style of the attack at `place`; 21 differ."""
    turn, colour = divmod(place, len(_OKABE_ITO))
    return Style(_OKABE_ITO[colour], _STROKES[turn % len(_STROKES)])


SERVER, CLIENTS, LEDGER = Style("#000000", "solid"), Style("#8a8a8a", "solid"), Style("#D55E00", "solid")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Curves that belong together: their mean is drawn, in a band from the lowest to the highest.

    Attributes:
        x: `point`.
        y: `curve point`, NaN where a curve has no value; every point has at least one.
        style: colour and stroke.
        level: height of a thin dotted line to compare with; NaN for none.
    """

    x: Numbers
    y: Numbers
    style: Style
    level: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram.

    Attributes:
        title: what it shows; the page has it above the diagram, not in it.
        xlabel, ylabel: the axes, with units.
        lines: what is drawn.
        limits: lowest and highest y; None fits the lines.
        log: logarithmic y where all values are positive and span a decade.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    limits: tuple[float, float] | None = None
    log: bool = False


def overlay(curves: Sequence[tuple[Numbers, Numbers]], style: Style, level: float = float("nan")) -> Line:
    """One line out of `(x, y)` curves, each with an x of its own."""
    x = np.unique(np.concatenate([points for points, _ in curves]))
    y = np.full((len(curves), len(x)), np.nan)
    for row, (points, values) in zip(y, curves, strict=True):
        row[np.searchsorted(x, points)] = values
    kept = np.isfinite(y).any(0)
    return Line(x=x[kept], y=np.where(np.isfinite(y), y, np.nan)[:, kept], style=style, level=level)


def epsilons(row: Mapping[str, str]) -> list[str]:
    """The columns of `metrics.csv` that say what was spent: `epsilon`, or `epsilon of NAME` of several defenses."""
    return [name for name in row if name.split(" of ")[0] == "epsilon"]


def called(column: str) -> str:
    """`epsilon of update-noise` as the page writes it."""
    return column.replace("epsilon", "ε", 1)


def training_panels(rows: Sequence[Mapping[str, str]]) -> list[Panel]:
    """Accuracy, loss and proved epsilon per round out of the rows of `metrics.csv`; none of what was not measured."""
    panels = [
        _over_rounds(rows, "accuracy", "Accuracy", "accuracy (fraction correct)", SERVER, (-0.02, 1.02)),
        _over_rounds(rows, "loss", "Loss", "loss (mean over the test examples)", SERVER),
    ]
    for column in epsilons(rows[0]) if rows else []:
        name = called(column)
        panels.append(_over_rounds(rows, column, f"Privacy spent: largest proved {name} of a client", name, LEDGER))
    return [panel for panel in panels if panel.lines]


def _over_rounds(
    rows: Sequence[Mapping[str, str]],
    column: str,
    title: str,
    ylabel: str,
    style: Style,
    limits: tuple[float, float] | None = None,
) -> Panel:
    """What `column` says of the server, in `style`, and of clients."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(column):
            curves.setdefault(row["client"], {})[int(row["round"])] = float(row[column])
    drawn = [(who, (np.array(list(c), float), np.array(list(c.values())))) for who, c in curves.items()]
    server = [curve for who, curve in drawn if who == "server"]
    clients = [curve for who, curve in drawn if who != "server"]
    lines = [overlay(some, look) for some, look in ((clients, CLIENTS), (server, style)) if some]
    kept = [line for line in lines if len(line.x)]
    return Panel(title=title, xlabel="round", ylabel=ylabel, lines=kept, limits=limits)


def attack_panels(
    findings: Sequence[tuple[str, Curves]], styles: Mapping[str, Style], floor: Mapping[str, float]
) -> list[Panel]:
    """One panel for each kind of curve, all attacks laid over one another.

    Args:
        findings: the attack and the curves of each finding.
        styles: how each attack is drawn.
        floor: PSNR of the best guess for each attack, a dotted line.
    """
    present = {name for _, curves in findings for name in curves}
    panels = []
    for name in [known for known in _TRACES if known in present] + sorted(present - set(_TRACES)):
        title, ylabel = _TRACES.get(name, (name, "value"))
        lines = []
        for attack, look in styles.items():
            curves = [curves[name] for owner, curves in findings if owner == attack and name in curves]
            if curves:
                lines.append(overlay(curves, look, floor.get(attack, np.nan) if name == "psnr" else np.nan))
        limits = (-0.03, 1.03) if name == "alpha" else None
        if lines := [line for line in lines if len(line.x)]:
            panels.append(
                Panel(
                    title=title,
                    xlabel="iteration",
                    ylabel=ylabel,
                    lines=lines,
                    limits=limits,
                    log=name in ("objective", "distance", "l_sim"),
                )
            )
    return panels


def draw(panel: Panel) -> bytes:
    """A PNG of `panel`, 480 CSS pixels wide."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(5.0, 3.1), dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for line in panel.lines:
        (drawn,) = axes.plot(
            line.x, np.nanmean(line.y, 0), line.style.colour, linestyle=line.style.stroke, linewidth=1.6
        )
        if len(line.x) <= 20:
            drawn.set(marker="o", markersize=3.5)
        if len(line.y) > 1:
            low, high = np.nanmin(line.y, 0), np.nanmax(line.y, 0)
            axes.fill_between(line.x, low, high, color=line.style.colour, alpha=0.15, linewidth=0)
        if np.isfinite(line.level):
            axes.axhline(line.level, color=line.style.colour, linewidth=1, linestyle=(0, (1, 2)))
    everything = np.concatenate([line.y.ravel() for line in panel.lines])
    low, high = np.nanmin(everything), np.nanmax(everything)
    if panel.log and low > 0 and high >= 10 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.limits:
        axes.set_ylim(*panel.limits)
    axes.set_xlabel(panel.xlabel, color=_INK)
    axes.set_ylabel(panel.ylabel, color=_INK)
    whole = all((line.x == line.x.round()).all() for line in panel.lines)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole))
    _plain(axes, 8.5)
    return _png(figure)


def _plain(axes: Axes, size: float) -> None:
    """Two spines, a faint grid behind what is drawn, and tick labels of `size` points."""
    axes.tick_params(colors=_INK, which="both", labelsize=size)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)


_SURE = "\u2713"


def image_sheet(claimed: Tensor, true: Tensor | None, values: Sequence[float], certified: Sequence[bool] = ()) -> bytes:
    """A PNG of true images above claimed ones, or of claimed ones alone, every pixel a sharp square.

    Args:
        claimed: `example channel height width` in [0, 1], in the order of `true`.
        true: likewise, or None.
        values: `example`, PSNR in dB, written under each pair; empty for none.
        certified: `example`, whether the attack is sure of it, written likewise.
    """
    from matplotlib.figure import Figure

    rows = [("reconstruction", claimed)] if true is None else [("original", true), ("reconstruction", claimed)]
    count, _, height, width = claimed.shape
    zoom = max(1, _CELL // max(height, width))
    high, wide = zoom * height + _GAP, zoom * width + _GAP
    captions, about = _captions(values, certified)
    canvas = np.ones((high * len(rows) + _GAP + (_TEXT if captions else 0), _MARGIN + wide * count + _GAP, 3))
    size = canvas.shape[1], canvas.shape[0]
    figure = Figure(figsize=((size[0] + 0.01) / DPI, (size[1] + 0.01) / DPI), dpi=DPI, facecolor="white")
    for line, (name, images) in enumerate(rows):
        top = _GAP + line * high
        middle = 1 - (top + (high - _GAP) / 2) / size[1]
        figure.text((_MARGIN - 12) / size[0], middle, name, ha="right", va="center", fontsize=8.5, color=_INK)
        for place, image in enumerate(_as_rgb(images)):
            left = _MARGIN + place * wide
            canvas[top - 1 : top + high - _GAP + 1, left - 1 : left + wide - _GAP + 1] = 0.8
            canvas[top : top + high - _GAP, left : left + wide - _GAP] = image.repeat(zoom, 0).repeat(zoom, 1)
    for place, caption in enumerate(captions):
        centre = (_MARGIN + place * wide + (wide - _GAP) / 2) / size[0]
        figure.text(centre, 6 / size[1], caption, ha="center", va="bottom", fontsize=8, color=_INK)
    if captions:
        figure.text((_MARGIN - 12) / size[0], 6 / size[1], about, ha="right", va="bottom", fontsize=8, color=_INK)
    figure.figimage(canvas, origin="upper", zorder=-1)
    return _png(figure)


def _captions(values: Sequence[float], certified: Sequence[bool]) -> tuple[list[str], str]:
    """What is written under each pair, and what that is."""
    numbers = [f"{value:.1f}" for value in values] or [""] * len(certified)
    about = ["PSNR, dB" if not certified else "dB"] * bool(values) + [f"{_SURE} certified"] * bool(certified)
    marks = [_SURE if sure else "" for sure in certified] or [""] * len(numbers)
    return [" ".join(filter(None, pair)) for pair in zip(numbers, marks, strict=True)], ", ".join(about)


def _as_rgb(images: Tensor) -> Numbers:
    """`example height width 3` in [0, 1]; other than three channels are shown as the grey of their mean."""
    shown = images if images.shape[1] == 3 else images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    array: Numbers = shown.permute(0, 2, 3, 1).double().nan_to_num().clamp(0, 1).numpy()
    return array


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Images in a gallery under a heading, in as many lines as they need.

    Attributes:
        title: the heading.
        images: `example channel height width` in [0, 1].
        captions: two lines of text for each.
    """

    title: str
    images: Tensor
    captions: Sequence[str]


def gallery(rows: Sequence[Row]) -> bytes:
    """A PNG of `rows` below one another, every pixel a sharp square."""
    from matplotlib.figure import Figure

    _, _, height, width = rows[0].images.shape
    zoom = max(1, _CELL // max(height, width))
    high, wide = zoom * height + 2 * _TEXT, zoom * width + _GAP
    across = max(1, _ACROSS // wide)
    lines = [-(-len(row.images) // across) for row in rows]
    canvas = np.ones((sum(_HEADING + high * count for count in lines) + _GAP, across * wide + _GAP, 3))
    size = canvas.shape[1], canvas.shape[0]
    figure = Figure(figsize=((size[0] + 0.01) / DPI, (size[1] + 0.01) / DPI), dpi=DPI, facecolor="white")
    top = 0
    for row, count in zip(rows, lines, strict=True):
        middle = 1 - (top + _HEADING / 2) / size[1]
        figure.text(_GAP / size[0], middle, row.title, ha="left", va="center", fontsize=8.5, color=_INK)
        top += _HEADING
        for place, (image, caption) in enumerate(zip(_as_rgb(row.images), row.captions, strict=True)):
            line, column = divmod(place, across)
            y, x = top + line * high, _GAP + column * wide
            canvas[y - 1 : y + zoom * height + 1, x - 1 : x + zoom * width + 1] = 0.8
            canvas[y : y + zoom * height, x : x + zoom * width] = image.repeat(zoom, 0).repeat(zoom, 1)
            centre, below = (x + zoom * width / 2) / size[0], 1 - (y + zoom * height + 4) / size[1]
            figure.text(centre, below, caption, ha="center", va="top", fontsize=6.5, color=_INK)
        top += high * count
    figure.figimage(canvas, origin="upper", zorder=-1)
    return _png(figure)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Values by name, the first one on top.

    Attributes:
        title: what it shows.
        xlabel: what a larger value says.
        names, values: a name and a value for each.
    """

    title: str
    xlabel: str
    names: Sequence[str]
    values: Sequence[float]


def ladders(panels: Sequence[Ladder]) -> bytes:
    """A PNG of `panels`, three beside one another."""
    from matplotlib.figure import Figure

    across = min(3, len(panels))
    down = -(-len(panels) // across)
    tallest = max(len(panel.values) for panel in panels)
    size = 3.4 * across, down * (1.1 + 0.17 * max(tallest, 3))
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, place)
        axes.plot(panel.values, range(len(panel.values)), "o", color=_OKABE_ITO[0], markersize=4)
        if min(panel.values) > 0 and max(panel.values) >= 100 * min(panel.values):
            axes.set_xscale("log")
        else:
            axes.locator_params(axis="x", nbins=5)
            axes.ticklabel_format(axis="x", scilimits=(-3, 4))
            axes.xaxis.get_offset_text().set_fontsize(7.5)
        axes.set_yticks(range(len(panel.names)), panel.names)
        axes.set_ylim(len(panel.values) - 0.5, -0.5)
        axes.set_title(panel.title, fontsize=8.5, color=_INK)
        axes.set_xlabel(panel.xlabel, fontsize=8, color=_INK)
        _plain(axes, 7.5)
    return _png(figure)
