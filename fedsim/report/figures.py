"""Pictures as PNG bytes: diagrams and image sheets on white, in colours the colour-blind can tell apart.

A page has its charts as SVG, see `fedsim.report.charts`. What is drawn here are files of their own, which commands
write for papers and slides: there is no page whose colours they could follow, and no reader's mouse.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import Z_DEFAULT_STRATEGY, Z_RLE

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.report.charts import Curve
from fedsim.report.pictures import images_as_bytes

if TYPE_CHECKING:  # Matplotlib is imported when something is drawn, so that no federation carries it while it trains
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

Numbers = NDArray[np.float64]

DPI = 192
"""Two device pixels for each CSS pixel."""
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of Okabe and Ito, which pages have as CSS variables, see `charts.Look`."""
_INK, _GRID, _FRAME = "#333333", "#d9d9d9", "#cccccc"
_IMAGE_SIDE, _GAP, _TEXT_HEIGHT, _NAMES_WIDTH = 104, 10, 34, 200
"""Image sheet in device pixels: largest side of an image, space around it, a line of text, names of rows."""
_GALLERY_WIDTH, _HEADING_HEIGHT = 1400, 56
"""Gallery in device pixels: its width, and the height of a heading."""


def draw_curve(curve: Curve, *, xlabel: str, ylabel: str) -> bytes:
    """Draw a curve and its band as a PNG, 480 CSS pixels wide; `charts.draw_curves` draws it in a page."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.0, 3.1), dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    x, y = np.asarray(curve.x), np.asarray(curve.y)
    (line,) = axes.plot(x, y, OKABE_ITO[0], linewidth=1.6)
    if len(x) <= 20:
        line.set(marker="o", markersize=3.5)
    if len(np.asarray(curve.low)):
        axes.fill_between(x, curve.low, curve.high, color=OKABE_ITO[0], alpha=0.15, linewidth=0)
    axes.set_xlabel(xlabel, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=bool((x == x.round()).all())))
    _style_axes(axes, 8.5)
    return _png(figure)


def _style_axes(axes: Axes, size: float) -> None:
    """Draw two spines, a faint grid behind the data, and tick labels of `size` points."""
    axes.tick_params(colors=_INK, which="both", labelsize=size)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)


_CHECK_MARK = "\u2713"


def draw_image_sheet(
    claimed: Tensor, true: Tensor | None, values: Sequence[float], certified: Sequence[bool] = ()
) -> bytes:
    """Draw true images above claimed ones, or claimed ones alone, as a PNG in which every pixel is a sharp square.

    Args:
        claimed: `example channel height width` in [0, 1], in the order of `true`.
        true: likewise, or None.
        values: `example`, PSNR in dB, written under each pair; empty for none.
        certified: `example`, whether the attack is sure of it, written likewise.
    """
    from PIL import Image, ImageDraw

    rows = {"reconstruction": claimed} if true is None else {"original": true, "reconstruction": claimed}
    count, _, height, width = claimed.shape
    zoom = max(1, _IMAGE_SIDE // max(height, width))
    row_height, column_width = zoom * height + _GAP, zoom * width + _GAP
    captions, legend = _captions(values, certified)
    mode = "RGB" if claimed.shape[1] == 3 else "L"
    pixels = np.array(_draw_empty_sheet(mode, tuple(rows), count, (zoom * height, zoom * width), legend))
    for row, images in enumerate(rows.values()):
        top = _GAP + row * row_height
        enlarged = images_as_bytes(images).repeat(zoom, 1).repeat(zoom, 2)
        columns = pixels[top : top + zoom * height, _NAMES_WIDTH : _NAMES_WIDTH + count * column_width]
        tiles = columns.reshape(zoom * height, count, column_width, *pixels.shape[2:])  # a view of `pixels`
        tiles[:, :, : zoom * width] = np.moveaxis(enlarged, 0, 1)
    sheet = Image.fromarray(pixels)
    draw = ImageDraw.Draw(sheet)
    for position, caption in enumerate(captions):
        centre = _NAMES_WIDTH + position * column_width + (column_width - _GAP) / 2
        draw.text((centre, sheet.height - 6), caption, fill=_INK, font=_font(8), anchor="md")
    file = io.BytesIO()
    # Of enlarged pixels, runs are found in half of the time that any repetition takes, and leave a file as small.
    sheet.save(file, format="PNG", compress_type=Z_RLE if zoom > 1 else Z_DEFAULT_STRATEGY)
    return file.getvalue()


@lru_cache(maxsize=32)
def _draw_empty_sheet(mode: str, rows: tuple[str, ...], count: int, size: tuple[int, int], legend: str) -> Picture:
    """Draw the names of rows, the frames of `count` images of this height and width, and what captions mean."""
    from PIL import Image, ImageDraw

    row_height, column_width = size[0] + _GAP, size[1] + _GAP
    width = _NAMES_WIDTH + column_width * count + _GAP
    height = row_height * len(rows) + _GAP + (_TEXT_HEIGHT if legend else 0)
    sheet = Image.new(mode, (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, name in enumerate(rows):
        top = _GAP + row * row_height
        draw.text((_NAMES_WIDTH - 12, top + size[0] / 2), name, fill=_INK, font=_font(8.5), anchor="rm")
        for position in range(count):
            left = _NAMES_WIDTH + position * column_width
            draw.rectangle((left - 1, top - 1, left + size[1], top + size[0]), fill=_FRAME)
    draw.text((_NAMES_WIDTH - 12, height - 6), legend, fill=_INK, font=_font(8), anchor="rd")
    return sheet


@cache
def _font(points: float) -> FreeTypeFont:
    """Return the font of the diagrams, which comes with Matplotlib."""
    from PIL import ImageFont

    matplotlib = find_spec("matplotlib")  # importing it takes a third of a second
    assert matplotlib is not None
    path = Path(str(matplotlib.origin)).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(path, points * DPI / 72)


def _captions(values: Sequence[float], certified: Sequence[bool]) -> tuple[list[str], str]:
    """Return the caption of each pair, and what captions mean."""
    numbers = [f"{value:.1f}" for value in values] or [""] * len(certified)
    marks = [_CHECK_MARK if is_sure else "" for is_sure in certified] or [""] * len(numbers)
    meanings = []
    if values:
        meanings.append("dB" if certified else "PSNR, dB")
    if certified:
        meanings.append(f"{_CHECK_MARK} certified")
    captions = [" ".join(filter(None, pair)) for pair in zip(numbers, marks, strict=True)]
    return captions, ", ".join(meanings)


def _as_rgb(images: Tensor) -> Numbers:
    """Return `example height width 3` in [0, 1]; unless they have three channels, as the grey of their mean."""
    rgb = images if images.shape[1] == 3 else images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    array: Numbers = rgb.permute(0, 2, 3, 1).double().nan_to_num().clamp(0, 1).numpy()
    return array


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class GalleryRow:
    """Images in a gallery under a heading, in as many lines as they need."""

    title: str
    images: Tensor
    captions: Sequence[str]


def gallery(rows: Sequence[GalleryRow]) -> bytes:
    """Draw `rows` below one another as a PNG in which every pixel is a sharp square."""
    from matplotlib.figure import Figure

    _, _, height, width = rows[0].images.shape
    zoom = max(1, _IMAGE_SIDE // max(height, width))
    line_height, column_width = zoom * height + 2 * _TEXT_HEIGHT, zoom * width + _GAP
    columns = max(1, _GALLERY_WIDTH // column_width)
    lines = [-(-len(row.images) // columns) for row in rows]
    canvas = np.ones(
        (sum(_HEADING_HEIGHT + line_height * count for count in lines) + _GAP, columns * column_width + _GAP, 3)
    )
    size = canvas.shape[1], canvas.shape[0]
    figure = Figure(figsize=((size[0] + 0.01) / DPI, (size[1] + 0.01) / DPI), dpi=DPI, facecolor="white")
    top = 0
    for row, count in zip(rows, lines, strict=True):
        middle = 1 - (top + _HEADING_HEIGHT / 2) / size[1]
        figure.text(_GAP / size[0], middle, row.title, ha="left", va="center", fontsize=8.5, color=_INK)
        top += _HEADING_HEIGHT
        for position, (image, caption) in enumerate(zip(_as_rgb(row.images), row.captions, strict=True)):
            line, column = divmod(position, columns)
            y, x = top + line * line_height, _GAP + column * column_width
            canvas[y - 1 : y + zoom * height + 1, x - 1 : x + zoom * width + 1] = 0.8
            canvas[y : y + zoom * height, x : x + zoom * width] = image.repeat(zoom, 0).repeat(zoom, 1)
            centre, caption_top = (x + zoom * width / 2) / size[0], 1 - (y + zoom * height + 4) / size[1]
            figure.text(centre, caption_top, caption, ha="center", va="top", fontsize=6.5, color=_INK)
        top += line_height * count
    figure.figimage(canvas, origin="upper", zorder=-1)
    return _png(figure)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Values by name, the first one on top.

    Attributes:
        xlabel: what a larger value says.
    """

    title: str
    xlabel: str
    names: Sequence[str]
    values: Sequence[float]


def draw_ladders(panels: Sequence[Ladder]) -> bytes:
    """Draw `panels` as a PNG, three beside one another."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(panel.values) for panel in panels)
    size = 3.4 * columns, rows * (1.1 + 0.17 * max(tallest, 3))
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    for position, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, position)
        axes.plot(panel.values, range(len(panel.values)), "o", color=OKABE_ITO[0], markersize=4)
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
        _style_axes(axes, 7.5)
    return _png(figure)
