"""Small charts as inline SVG: curves with bands, points with intervals, and tables with shaded cells.

They are drawn here and not by Matplotlib, whose SVG has fixed colours and cannot react to a reader's mouse. These
follow the page into dark mode (colours are CSS variables), show the values under the mouse or the arrow keys, and bring
a table of their values for readers who cannot see them. `templates/style.css` defines their appearance, and
`templates/charts.js` the reading of values; without JavaScript a browser still shows values as tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from fedsim.report.html import render_fragment

Numbers = NDArray[np.float64]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom; of an error bar the coordinates of its two ends."""

WIDTH, HEIGHT = 400, 250
"""Size of a chart in its own units, about one CSS pixel each."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 22, 36
COLOURS, _DASHES = 7, ("", "6 3", "1.5 3")
_STOPS, _PIECES = 60, 200
"""Points of a curve whose values can be read, and pieces of a longer curve of which the extremes are drawn."""
_LETTER_WIDTH, _LETTER_HEIGHT = 6.2, 12
"""Size of a letter, roughly, to keep labels from overlapping."""


@dataclass(frozen=True)
class Look:
    """Colour and dashes of a curve or point; 21 differ.

    Whatever has the same `place` in its list is drawn alike everywhere on a page. Colours are those of Okabe and Ito,
    which the colour-blind can tell apart; lighter on dark pages, grey where `place` is below 0.
    """

    place: int

    @property
    def colour(self) -> str:
        """Colour as CSS; the variables are in `style.css`."""
        return f"var(--series-{self.place % COLOURS if self.place >= 0 else 'quiet'})"

    @property
    def dashes(self) -> str:
        """Dashes of a line as SVG; empty for a solid one."""
        return _DASHES[max(0, self.place) // COLOURS % len(_DASHES)]


QUIET = Look(-1)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Line with a band around it.

    Attributes:
        name: what it shows.
        look: colour and dashes.
        x: `point`, finite.
        y: `point`, finite.
        low: `point`, the lower end of the band; empty where there is none.
        high: `point`, its upper end.
        level: height of a thin dotted line to compare with; NaN for none.
    """

    name: str
    look: Look
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike = ()
    high: ArrayLike = ()
    level: float = math.nan


@dataclass(frozen=True, kw_only=True)
class ChartPoint:
    """Point with its interval along each axis where that has finite ends.

    Attributes:
        name: what it shows, read with its values.
        look: its colour.
        x: where it is along the horizontal axis, finite.
        y: where it is along the vertical axis, finite.
        x_interval: lowest and highest `x`.
        y_interval: lowest and highest `y`.
        label: text beside it where there is room; it is in the table in any case.
        marked: whether it is on the line that joins such points, and filled.
        href: target of its link; empty for none.
    """

    name: str
    look: Look
    x: float
    y: float
    x_interval: tuple[float, float] = (math.nan, math.nan)
    y_interval: tuple[float, float] = (math.nan, math.nan)
    label: str = ""
    marked: bool = False
    href: str = ""


@dataclass(frozen=True)
class Guide:
    """Thin dotted line across a chart, to compare points with.

    Attributes:
        value: where it crosses its axis; none is drawn where it is not finite.
        label: text beside it.
    """

    value: float
    label: str


NO_GUIDE = Guide(math.nan, "")


@dataclass(frozen=True, kw_only=True)
class HeatMapCell:
    """Cell of a heat map.

    Attributes:
        text: its text.
        shade: from 0, not coloured, to 1; NaN likewise not coloured.
        tooltip: more words on it.
        href: target of its link; empty for none.
    """

    text: str
    shade: float = math.nan
    tooltip: str = ""
    href: str = ""

    @property
    def strength(self) -> float:
        """`shade`, 0 where there is none."""
        return min(1.0, max(0.0, self.shade)) if math.isfinite(self.shade) else 0.0


def draw_curves(
    title: str,
    found: Sequence[Curve],
    *,
    xlabel: str,
    ylabel: str,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    log_across: bool = False,
    legend: bool = False,
) -> Markup:
    """Draw at least one curve, each with at least one point.

    Args:
        title: what the chart shows.
        xlabel, ylabel: the axes, with units.
        limits: lowest and highest y that are shown at least; None fits the curves.
        log: logarithmic y where all values are positive and span a decade.
        log_across: likewise x.
    """
    drawn = [_CurveArrays.from_curve(curve) for curve in found]
    values = np.concatenate([part for curve in drawn for part in (curve.y, curve.low, curve.high)])
    levels = [curve.level for curve in found if math.isfinite(curve.level)]
    xs = np.concatenate([curve.x for curve in drawn])
    across = Axis.fit_values(xs, xlabel, (_LEFT, WIDTH - _RIGHT), log=log_across)
    up = Axis.fit_values([*values, *levels, *(limits or ())], ylabel, (HEIGHT - _BOTTOM, _TOP), log=log)
    stops = _readout_stops(drawn, across, up)
    return _render_chart(
        title,
        across,
        up,
        lines=[curve.line(across, up) for curve in drawn],
        stops=stops,
        table=_table_of_curves(drawn, xlabel, stops),
        some=len(stops) < len(np.unique(xs)),
        legend=[(curve.name, curve.look) for curve in found] if legend else [],
    )


def draw_points(
    title: str,
    found: Sequence[ChartPoint],
    *,
    xlabel: str,
    ylabel: str,
    legend: Sequence[tuple[str, Look]] = (),
    guide_across: Guide = NO_GUIDE,
    guide_up: Guide = NO_GUIDE,
) -> Markup:
    """Draw at least one point; `marked` ones are joined from left to right.

    Args:
        title: what the chart shows.
        xlabel, ylabel: the axes, with units.
        legend: what colours mean.
        guide_across: vertical line at a value of x.
        guide_up: horizontal line at a value of y.
    """
    xs = [guide_across.value, *(value for point in found for value in (point.x, *point.x_interval))]
    ys = [guide_up.value, *(value for point in found for value in (point.y, *point.y_interval))]
    across = Axis.fit_values(xs, xlabel, (_LEFT, WIDTH - _RIGHT), room=0.06)
    up = Axis.fit_values(ys, ylabel, (HEIGHT - _BOTTOM, _TOP), room=0.06)
    # Where points, their intervals and their labels are drawn.
    places = [(across.position_of(point.x), up.position_of(point.y)) for point in found]
    bars = []
    for point, (x, y) in zip(found, places, strict=True):
        horizontal = _error_bar(across, point.x_interval, y, level=True)
        vertical = _error_bar(up, point.y_interval, x, level=False)
        bars.append([*horizontal, *vertical])
    guides = [*_draw_guide(across, guide_across, vertical=True), *_draw_guide(up, guide_up, vertical=False)]
    occupied = [bar for point_bars in bars for bar in point_bars] + [guide["box"] for guide in guides]
    labels = _label_places(places, occupied, [p.label for p in found])
    marks, rows = [], []
    for point, (x, y), point_bars, label in zip(found, places, bars, labels, strict=True):
        x_text, y_text = _value_text(point.x, point.x_interval), _value_text(point.y, point.y_interval)
        tooltip = f"{point.name}: {xlabel} {x_text}, {ylabel} {y_text}"
        marks.append({"point": point, "x": x, "y": y, "bars": point_bars, "label": label, "tooltip": tooltip})
        rows.append([point.name, x_text, y_text])
    front = sorted(position for point, position in zip(found, places, strict=True) if point.marked)
    return _render_chart(
        title,
        across,
        up,
        guides=guides,
        marks=marks,
        front=_svg_path(np.array(front)) if len(front) > 1 else "",
        table=(["", xlabel, ylabel], rows),
        legend=legend,
        linked=any(point.href for point in found),
    )


def _render_chart(title: str, across: Axis, up: Axis, **parts: Any) -> Markup:
    """Render a chart with these parts of its template alone."""
    frame = _LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    size = {"width": WIDTH, "height": HEIGHT, "frame": frame}
    nothing = {"lines": (), "guides": (), "marks": (), "stops": (), "front": "", "some": False, "linked": False}
    return render_fragment("chart.html.j2", title=title, across=across, up=up, **size | nothing | parts)


def draw_heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[HeatMapCell]], *, corner: str = ""
) -> Markup:
    """Draw a table whose cells are shaded: it is its own table of values, and fits a narrow screen by scrolling.

    Args:
        title: what it shows, and what a darker cell means.
        rows, columns: names.
        cells: `row column`.
        corner: what rows and columns are, e.g. `attack / defense`.
    """
    named_rows = list(zip(rows, cells, strict=True))
    return render_fragment("heat.html.j2", title=title, columns=columns, rows=named_rows, corner=corner)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Scale from values to positions along one side of a chart.

    Attributes:
        label: what it shows, with its unit.
        low, high: values at its ends, logarithms where it is logarithmic.
        ends: positions of these.
        log: whether it is logarithmic.
        ticks: positions and texts.
    """

    label: str
    low: float
    high: float
    ends: tuple[float, float]
    log: bool = False
    ticks: Sequence[tuple[float, str]] = field(default=(), compare=False)

    @classmethod
    def fit_values(
        cls, values: ArrayLike, label: str, ends: tuple[float, float], *, room: float = 0.03, log: bool = False
    ) -> Axis:
        """Return the axis on which all finite `values` lie, with some room at the ends."""
        finite = np.asarray(values, float)
        finite = finite[np.isfinite(finite)]
        low, high = float(finite.min()), float(finite.max())
        log = log and low > 0 and high >= 10 * low
        if log:
            low, high = math.log10(low), math.log10(high)
        span = (high / 2 - low / 2) * 2 or abs(low) / 2 or 1.0  # halves, because the difference may overflow
        axis = cls(label=label, low=low - room * span, high=high + room * span, ends=ends, log=log)
        whole = not log and bool((finite == finite.round()).all())
        ticks = [(axis.position_of(value), _number_text(value)) for value in axis.values_of_ticks(whole=whole)]
        return cls(label=label, low=axis.low, high=axis.high, ends=ends, log=log, ticks=ticks)

    def position_of(self, value: float) -> float:
        """Return the position of `value`."""
        return float(self.positions_of(np.array([value]))[0])

    def positions_of(self, values: Numbers) -> Numbers:
        """Return the positions of `values`."""
        scaled = np.log10(values) if self.log else values
        share = (scaled / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    def values_of_ticks(self, *, whole: bool) -> list[float]:
        """Return round values between the ends.

        Args:
            whole: whole numbers only.
        """
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.log:
            decades = self.high - self.low
            subs = (1, 2, 5) if decades < 2 else (1,)
            values = LogLocator(subs=subs, numticks=7).tick_values(10**self.low, 10**self.high)
            visible = [value for value in values if self.low <= math.log10(value) <= self.high]
        else:
            values = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(self.low, self.high)
            visible = [value for value in values if self.low <= value <= self.high]
        return [float(value) for value in visible]


@dataclass(frozen=True, kw_only=True)
class _CurveArrays:
    """Curve whose numbers are arrays."""

    curve: Curve
    x: Numbers
    y: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def from_curve(cls, curve: Curve) -> _CurveArrays:
        x, y, low, high = (np.asarray(part, float) for part in (curve.x, curve.y, curve.low, curve.high))
        return cls(curve=curve, x=x, y=y, low=low, high=high)

    def line(self, across: Axis, up: Axis) -> dict[str, object]:
        """Return what the template draws."""
        path = _positions(self.x, self.y, across, up)
        band = ""
        if len(self.low):
            ends = _positions(self.x, self.high, across, up), _positions(self.x, self.low, across, up)[::-1]
            band = _svg_path(np.concatenate(ends)) + "z"
        level = up.position_of(self.curve.level) if math.isfinite(self.curve.level) else None
        dots = path.tolist() if len(self.x) <= 20 else []
        return {"look": self.curve.look, "path": _svg_path(path), "band": band, "level": level, "dots": dots}

    def text_at(self, x: float) -> str:
        """Format its value at x, with the ends of its band; empty where it has none."""
        index = int(np.searchsorted(self.x, x))
        if index == len(self.x) or self.x[index] != x:
            return ""
        ends = (float(self.low[index]), float(self.high[index])) if len(self.low) else (math.nan, math.nan)
        return _value_text(float(self.y[index]), ends)


def _positions(x: Numbers, y: Numbers, across: Axis, up: Axis) -> Numbers:
    """Return positions `point 2`; of a long curve the extremes of each piece, so that no peak is lost."""
    if len(x) > 2 * _PIECES:
        pieces = np.array_split(np.arange(len(x)), _PIECES)
        extremes = [piece[index] for piece in pieces for index in (y[piece].argmin(), y[piece].argmax())]
        drawn = np.unique([0, *extremes, len(x) - 1])
        x, y = x[drawn], y[drawn]
    return np.stack([across.positions_of(x), up.positions_of(y)], 1)


def _svg_path(places: Numbers) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places.tolist())


def _readout_stops(drawn: Sequence[_CurveArrays], across: Axis, up: Axis) -> list[dict[str, object]]:
    """Return where values can be read: the strip under the mouse, the text, and the points that it is about."""
    # Some of the points of each curve, evenly spaced.
    chosen = [curve.x[np.unique(np.linspace(0, len(curve.x) - 1, _STOPS).round().astype(int))] for curve in drawn]
    xs = np.unique(np.concatenate(chosen))
    # Each strip reaches halfway to the next point.
    places = across.positions_of(xs)
    middles = (places[:-1] + places[1:]) / 2
    starts = np.concatenate([[_LEFT], middles])
    ends = np.concatenate([middles, [WIDTH - _RIGHT]])
    stops = []
    for x, position, start, end in zip(xs.tolist(), places.tolist(), starts.tolist(), ends.tolist(), strict=True):
        texts, dots = [], []
        for curve in drawn:
            if text := curve.text_at(x):
                texts.append(f"{curve.curve.name} {text}" if curve.curve.name else text)
                dots.append((up.position_of(float(curve.y[np.searchsorted(curve.x, x)])), curve.curve.look))
        tooltip = f"{across.label} {_number_text(x)}: {'; '.join(texts)}"
        stops.append(
            {"value": x, "x": position, "start": start, "width": end - start, "tooltip": tooltip, "dots": dots}
        )
    return stops


def _table_of_curves(
    drawn: Sequence[_CurveArrays], xlabel: str, stops: Iterable[dict[str, object]]
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the table of values."""
    xs = [float(str(stop["value"])) for stop in stops]
    rows = [[_number_text(x), *(curve.text_at(x) or "–" for curve in drawn)] for x in xs]
    return [xlabel, *(curve.curve.name or "value" for curve in drawn)], rows


def _draw_guide(axis: Axis, guide: Guide, *, vertical: bool) -> list[dict[str, Any]]:
    """Return the line and the label of a guide, with the box that the label fills; none where it has no value."""
    if not math.isfinite(guide.value):
        return []
    position, width = axis.position_of(guide.value), _LETTER_WIDTH * len(guide.label)
    if vertical:
        is_left = position + 4 + width <= WIDTH - _RIGHT
        x, y = position + (4 if is_left else -4), _TOP + 9.0
        path, anchor = f"M{position:.1f} {_TOP}V{HEIGHT - _BOTTOM}", "start" if is_left else "end"
    else:
        is_left, x, y = False, float(WIDTH - _RIGHT), position - 4
        path, anchor = f"M{_LEFT} {position:.1f}H{WIDTH - _RIGHT}", "end"
    left = x if is_left else x - width
    box = left, y - _LETTER_HEIGHT + 2, left + width, y + 2
    return [{"path": path, "x": x, "y": y, "anchor": anchor, "label": guide.label, "box": box}]


def _error_bar(axis: Axis, ends: tuple[float, float], across_place: float, *, level: bool) -> list[Box]:
    """Return the interval of a point along one axis as x1, y1, x2, y2; none where it has no finite ends."""
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1])):
        return []
    low, high = axis.position_of(ends[0]), axis.position_of(ends[1])
    return [(low, across_place, high, across_place) if level else (across_place, low, across_place, high)]


def _label_places(
    places: Sequence[tuple[float, float]], bars: Sequence[Box], texts: Sequence[str]
) -> list[dict[str, object] | None]:
    """Place each text so that it covers no other text, point or bar; None where there is no room."""
    occupied = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    occupied += [(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1) for x1, y1, x2, y2 in bars]
    labels: list[dict[str, object] | None] = []
    for (x, y), text in zip(places, texts, strict=True):
        labels.append(None)
        width = _LETTER_WIDTH * len(text)
        candidates = (("start", x + 8, y + 4), ("end", x - 8, y + 4), ("middle", x, y - 9), ("middle", x, y + 18))
        for anchor, label_x, label_y in candidates:
            left = label_x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
            box = left, label_y - _LETTER_HEIGHT + 2, left + width, label_y + 2
            inside = box[0] >= _LEFT and box[2] <= WIDTH - _RIGHT and box[1] >= 0 and box[3] <= HEIGHT - _BOTTOM
            if text and inside and not any(_overlap(box, other_box) for other_box in occupied):
                occupied.append(box)
                labels[-1] = {"anchor": anchor, "x": label_x, "y": label_y, "text": text}
                break
    return labels


def _overlap(first: Box, second: Box) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def _value_text(value: float, ends: tuple[float, float]) -> str:
    """Format a number, and the ends of its interval where they are finite and differ."""
    if math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] != ends[1]:
        return f"{_number_text(value)} ({_number_text(ends[0])} to {_number_text(ends[1])})"
    return _number_text(value)


def _number_text(value: float) -> str:
    """Format with at most four digits, and without an exponent where a round number needs none."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}".replace("-0", "0") if value == 0 else f"{value:.0f}"
    return f"{value:.4g}"
