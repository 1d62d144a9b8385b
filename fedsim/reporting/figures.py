"""From numbers to PNG bytes: diagrams and image sheets on white, in colours the colour-blind can tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.reporting.pictures import as_bytes

if TYPE_CHECKING:  # Matplotlib is imported when something is drawn, so that no federation carries it while it trains
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.ImageFont import FreeTypeFont

Numbers = NDArray[np.float64]

DPI = 192
"""Two device pixels for each CSS pixel."""
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STROKES = ("solid", "dashed", "dotted")
_INK, _FAINT, _FRAME = "#333333", "#d9d9d9", "#cccccc"
_CELL, _GAP, _TEXT, _MARGIN = 104, 10, 34, 200
"""Of an image sheet, in device pixels: largest side of an image, space around it, line of text, row names."""
_ACROSS, _HEADING = 1400, 56
"""Of a gallery, in device pixels: its width, and the height of a heading."""


@dataclass(frozen=True)
class Style:
    """How one attack is drawn everywhere in a report; the names are those of CSS, too."""

    colour: str
    stroke: str


def style(place: int) -> Style:
    """The style of the attack at `place`; 21 differ."""
    turn, colour = divmod(place, len(_OKABE_ITO))
    return Style(_OKABE_ITO[colour], _STROKES[turn % len(_STROKES)])


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
    from PIL import Image, ImageDraw

    rows = [("reconstruction", claimed)] if true is None else [("original", true), ("reconstruction", claimed)]
    count, _, height, width = claimed.shape
    zoom = max(1, _CELL // max(height, width))
    high, wide = zoom * height + _GAP, zoom * width + _GAP
    captions, about = _captions(values, certified)
    size = _MARGIN + wide * count + _GAP, high * len(rows) + _GAP + (_TEXT if captions else 0)
    sheet = Image.new("RGB" if claimed.shape[1] == 3 else "L", size, "white")
    draw = ImageDraw.Draw(sheet)
    for line, (name, images) in enumerate(rows):
        top = _GAP + line * high
        draw.text((_MARGIN - 12, top + (high - _GAP) / 2), name, fill=_INK, font=_font(8.5), anchor="rm")
        for place, image in enumerate(as_bytes(images)):
            left = _MARGIN + place * wide
            draw.rectangle((left - 1, top - 1, left + wide - _GAP, top + high - _GAP), fill=_FRAME)
            sheet.paste(Image.fromarray(image.repeat(zoom, 0).repeat(zoom, 1)), (left, top))
    for place, caption in enumerate(captions):
        centre = _MARGIN + place * wide + (wide - _GAP) / 2
        draw.text((centre, size[1] - 6), caption, fill=_INK, font=_font(8), anchor="md")
    if captions:
        draw.text((_MARGIN - 12, size[1] - 6), about, fill=_INK, font=_font(8), anchor="rd")
    file = io.BytesIO()
    sheet.save(file, format="PNG")
    return file.getvalue()


@cache
def _font(points: float) -> FreeTypeFont:
    """That of the diagrams, which Matplotlib brings along."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), points * DPI / 72)


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
