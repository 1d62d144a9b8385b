"""Small charts as inline SVG: curves with bands, points with intervals, and a table whose cells are shaded.

They are drawn here and not by Matplotlib, whose SVG has fixed colours and knows nothing of a reader's mouse. These
follow the page into dark mode (colours are CSS variables), say the values under the mouse or the arrow keys, and bring
a table of their values for who cannot see them. `templates/style.css` has their looks, and `templates/charts.js` the
reading of values; without JavaScript a browser still shows values as tooltips, and the table is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from fedsim.reporting.html import fragment

Numbers = NDArray[np.float64]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom; of a bar its two ends."""

WIDTH, HEIGHT = 400, 250
"""Of a chart, in its own units; about one CSS pixel each."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 22, 36
COLOURS, _DASHES = 7, ("", "6 3", "1.5 3")
_STOPS, _KEPT = 60, 200
"""Places of a curve at which its values are told, and pieces of a longer curve of which the extremes are drawn."""
_LETTER, _LINE = 6.2, 12
"""Width and height of a letter, roughly, to keep labels apart."""


@dataclass(frozen=True)
class Look:
    """How whatever stands at `place` among others is drawn everywhere on a page; 21 differ.

    Colours are those of Okabe and Ito, which the colour-blind can tell apart; lighter on dark pages, grey below 0.
    """

    place: int

    @property
    def colour(self) -> str:
        """As CSS; the variables are in `style.css`."""
        return f"var(--series-{self.place % COLOURS if self.place >= 0 else 'quiet'})"

    @property
    def dashes(self) -> str:
        """Of its line, as SVG; empty for a solid one."""
        return _DASHES[max(0, self.place) // COLOURS % len(_DASHES)]


QUIET = Look(-1)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, and the band around it.

    Attributes:
        name: what it is of.
        look: how it is drawn; anything with a CSS `colour` and `dashes`.
        x, y: `point`, finite.
        low, high: `point`, the ends of the band; empty where there is none.
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
class Point:
    """A point, with its interval along each axis where that has finite ends.

    Attributes:
        name: what it is of, told with its values.
        look: its colour.
        x, y: where it is, finite.
        x_interval, y_interval: lowest and highest value.
        label: what is written beside it where there is room; it is in the table in any case.
        marked: whether it is on the line that joins such points, and filled.
        href: where it leads; empty for nowhere.
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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a heat map.

    Attributes:
        text: what is written in it.
        shade: from 0, not coloured, to 1; NaN likewise not coloured.
        told: what is said of it in more words, as a tooltip.
        href: where it leads; empty for nowhere.
    """

    text: str
    shade: float = math.nan
    told: str = ""
    href: str = ""

    @property
    def strength(self) -> float:
        """`shade`, 0 where there is none."""
        return min(1.0, max(0.0, self.shade)) if math.isfinite(self.shade) else 0.0


def curves(
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
    """A figure of at least one curve, each with at least one point.

    Args:
        title: what it shows.
        found: what is drawn.
        xlabel, ylabel: the axes, with units.
        limits: lowest and highest y that are shown at least; None fits the curves.
        log: logarithmic y where all values are positive and span a decade.
        log_across: likewise x.
        legend: whether it says itself which curve is which.
    """
    drawn = [_Drawn.of(curve) for curve in found]
    values = np.concatenate([part for curve in drawn for part in (curve.y, curve.low, curve.high)])
    levels = [curve.level for curve in found if math.isfinite(curve.level)]
    across = Axis.of(np.concatenate([curve.x for curve in drawn]), xlabel, (_LEFT, WIDTH - _RIGHT), log=log_across)
    up = Axis.of([*values, *levels, *(limits or ())], ylabel, (HEIGHT - _BOTTOM, _TOP), log=log)
    stops = _stops(drawn, across, up)
    return fragment(
        "chart.html.j2",
        title=title,
        width=WIDTH,
        height=HEIGHT,
        frame=(_LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM),
        across=across,
        up=up,
        lines=[curve.line(across, up) for curve in drawn],
        marks=[],
        front="",
        stops=stops,
        table=_table_of_curves(drawn, xlabel, stops),
        some=len(stops) < len(np.unique(np.concatenate([curve.x for curve in drawn]))),
        legend=[(curve.name, curve.look) for curve in found] if legend else [],
        linked=False,
    )


def points(
    title: str,
    found: Sequence[Point],
    *,
    xlabel: str,
    ylabel: str,
    log: bool = False,
    legend: Sequence[tuple[str, Look]] = (),
) -> Markup:
    """A figure of at least one point; `marked` ones are joined from left to right.

    Args:
        title: what it shows.
        found: what is drawn.
        xlabel, ylabel: the axes, with units.
        log: logarithmic x where all values are positive and span a decade.
        legend: what colours say.
    """
    across = Axis.of(
        [v for p in found for v in (p.x, *p.x_interval)], xlabel, (_LEFT, WIDTH - _RIGHT), room=0.06, log=log
    )
    up = Axis.of([v for p in found for v in (p.y, *p.y_interval)], ylabel, (HEIGHT - _BOTTOM, _TOP), room=0.06)
    places = [(across.at(p.x), up.at(p.y)) for p in found]
    bars = [
        [*_bar(across, p.x_interval, y, level=True), *_bar(up, p.y_interval, x, level=False)]
        for p, (x, y) in zip(found, places, strict=True)
    ]
    labels = _labels(places, [bar for own in bars for bar in own], [p.label for p in found])
    marks = [
        {"point": p, "x": x, "y": y, "bars": own, "label": label, "told": _told(p, xlabel, ylabel)}
        for p, (x, y), own, label in zip(found, places, bars, labels, strict=True)
    ]
    front = sorted(place for p, place in zip(found, places, strict=True) if p.marked)
    return fragment(
        "chart.html.j2",
        title=title,
        width=WIDTH,
        height=HEIGHT,
        frame=(_LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM),
        across=across,
        up=up,
        lines=[],
        marks=marks,
        front=_path(np.array(front)) if len(front) > 1 else "",
        stops=[],
        table=(["", xlabel, ylabel], [[p.name, _value(p.x, p.x_interval), _value(p.y, p.y_interval)] for p in found]),
        some=False,
        legend=legend,
        linked=any(p.href for p in found),
    )


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]], *, corner: str = ""
) -> Markup:
    """A table whose cells are shaded: it is its own table of values, and fits a narrow screen by scrolling.

    Args:
        title: what it shows, and what a darker cell says.
        rows, columns: names.
        cells: `row column`.
        corner: what rows and columns are, e.g. `attack / defense`.
    """
    named = list(zip(rows, cells, strict=True))
    return fragment("heat.html.j2", title=title, columns=columns, rows=named, corner=corner)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From values to places along one side of a chart.

    Attributes:
        label: what it is, with its unit.
        low, high: values at its ends, logarithms where it is logarithmic.
        ends: places of these.
        log: whether it is logarithmic.
        ticks: places and texts.
    """

    label: str
    low: float
    high: float
    ends: tuple[float, float]
    log: bool = False
    ticks: Sequence[tuple[float, str]] = field(default=(), compare=False)

    @classmethod
    def of(
        cls, values: ArrayLike, label: str, ends: tuple[float, float], *, room: float = 0.03, log: bool = False
    ) -> Axis:
        """The axis on which all finite `values` lie, with some room at the ends."""
        known = np.asarray(values, float)
        known = known[np.isfinite(known)]
        low, high = float(known.min()), float(known.max())
        log = log and low > 0 and high >= 10 * low
        if log:
            low, high = math.log10(low), math.log10(high)
        span = (high / 2 - low / 2) * 2 or abs(low) / 2 or 1.0  # halves, because the difference may overflow
        axis = cls(label=label, low=low - room * span, high=high + room * span, ends=ends, log=log)
        whole = not log and bool((known == known.round()).all())
        ticks = [(axis.at(value), _figure(value)) for value in axis.values_of_ticks(whole=whole)]
        return cls(label=label, low=axis.low, high=axis.high, ends=ends, log=log, ticks=ticks)

    def at(self, value: float) -> float:
        """The place of `value`."""
        return float(self.all_at(np.array([value]))[0])

    def all_at(self, values: Numbers) -> Numbers:
        """The places of `values`."""
        inner = np.log10(values) if self.log else values
        share = (inner / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    def values_of_ticks(self, *, whole: bool) -> list[float]:
        """Round values between its ends."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.log:
            decades = self.high - self.low
            subs = (1, 2, 5) if decades < 2 else (1,)
            values = LogLocator(subs=subs, numticks=7).tick_values(10**self.low, 10**self.high)
            inside = [value for value in values if self.low <= math.log10(value) <= self.high]
        else:
            values = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(self.low, self.high)
            inside = [value for value in values if self.low <= value <= self.high]
        return [float(value) for value in inside]


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A curve whose numbers are arrays."""

    curve: Curve
    x: Numbers
    y: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, curve: Curve) -> _Drawn:
        x, y, low, high = (np.asarray(part, float) for part in (curve.x, curve.y, curve.low, curve.high))
        return cls(curve=curve, x=x, y=y, low=low, high=high)

    def line(self, across: Axis, up: Axis) -> dict[str, object]:
        """What the template draws."""
        path = _places(self.x, self.y, across, up)
        band = ""
        if len(self.low):
            ends = _places(self.x, self.high, across, up), _places(self.x, self.low, across, up)[::-1]
            band = _path(np.concatenate(ends)) + "z"
        level = up.at(self.curve.level) if math.isfinite(self.curve.level) else None
        dots = path.tolist() if len(self.x) <= 20 else []
        return {"look": self.curve.look, "path": _path(path), "band": band, "level": level, "dots": dots}

    def text_at(self, x: float) -> str:
        """Its value there, with the ends of its band; empty where it has none."""
        place = int(np.searchsorted(self.x, x))
        if place == len(self.x) or self.x[place] != x:
            return ""
        ends = (float(self.low[place]), float(self.high[place])) if len(self.low) else (math.nan, math.nan)
        return _value(float(self.y[place]), ends)


def _places(x: Numbers, y: Numbers, across: Axis, up: Axis) -> Numbers:
    """`point 2`; of a long curve the lowest and the highest point of each piece, so that no peak is lost."""
    if len(x) > 2 * _KEPT:
        pieces = np.array_split(np.arange(len(x)), _KEPT)
        extremes = [piece[place] for piece in pieces for place in (y[piece].argmin(), y[piece].argmax())]
        kept = np.unique([0, *extremes, len(x) - 1])
        x, y = x[kept], y[kept]
    return np.stack([across.all_at(x), up.all_at(y)], 1)


def _path(places: Numbers) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places.tolist())


def _stops(drawn: Sequence[_Drawn], across: Axis, up: Axis) -> list[dict[str, object]]:
    """Where values are told: the strip that is watched, what is said, and the points that it is said of."""
    chosen = [curve.x[np.unique(np.linspace(0, len(curve.x) - 1, _STOPS).round().astype(int))] for curve in drawn]
    xs = np.unique(np.concatenate(chosen))
    places = across.all_at(xs)
    middles = (places[:-1] + places[1:]) / 2
    starts = np.concatenate([[_LEFT], middles])
    ends = np.concatenate([middles, [WIDTH - _RIGHT]])
    stops = []
    for x, place, start, end in zip(xs.tolist(), places.tolist(), starts.tolist(), ends.tolist(), strict=True):
        texts = [(curve, text) for curve in drawn if (text := curve.text_at(x))]
        said = "; ".join(f"{curve.curve.name} {text}" if curve.curve.name else text for curve, text in texts)
        dots = [(up.at(float(curve.y[np.searchsorted(curve.x, x)])), curve.curve.look) for curve, _ in texts]
        told = f"{across.label} {_figure(x)}: {said}"
        stops.append({"value": x, "x": place, "start": start, "width": end - start, "told": told, "dots": dots})
    return stops


def _table_of_curves(
    drawn: Sequence[_Drawn], xlabel: str, stops: Iterable[dict[str, object]]
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    xs = [float(str(stop["value"])) for stop in stops]
    rows = [[_figure(x), *(curve.text_at(x) or "–" for curve in drawn)] for x in xs]
    return [xlabel, *(curve.curve.name or "value" for curve in drawn)], rows


def _bar(axis: Axis, ends: tuple[float, float], other: float, *, level: bool) -> list[Box]:
    """The interval of a point along one axis, as x1, y1, x2, y2; none where it has no finite ends."""
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1])):
        return []
    low, high = axis.at(ends[0]), axis.at(ends[1])
    return [(low, other, high, other) if level else (other, low, other, high)]


def _told(point: Point, xlabel: str, ylabel: str) -> str:
    x, y = _value(point.x, point.x_interval), _value(point.y, point.y_interval)
    return f"{point.name}: {xlabel} {x}, {ylabel} {y}"


def _labels(
    places: Sequence[tuple[float, float]], bars: Sequence[Box], texts: Sequence[str]
) -> list[dict[str, object] | None]:
    """Where each text is written so that it covers no other text, point or bar; None where there is no such place."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    taken += [(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1) for x1, y1, x2, y2 in bars]
    found: list[dict[str, object] | None] = []
    for (x, y), text in zip(places, texts, strict=True):
        found.append(None)
        wide = _LETTER * len(text)
        beside = (("start", x + 8, y + 4), ("end", x - 8, y + 4), ("middle", x, y - 9), ("middle", x, y + 18))
        for anchor, at, base in beside:
            left = at - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            box = left, base - _LINE + 2, left + wide, base + 2
            inside = box[0] >= _LEFT and box[2] <= WIDTH - _RIGHT and box[1] >= 0 and box[3] <= HEIGHT - _BOTTOM
            if text and inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                found[-1] = {"anchor": anchor, "x": at, "y": base, "text": text}
                break
    return found


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _value(value: float, ends: tuple[float, float]) -> str:
    """A number, and the ends of its interval where they are finite and differ."""
    if math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] != ends[1]:
        return f"{_figure(value)} ({_figure(ends[0])} to {_figure(ends[1])})"
    return _figure(value)


def _figure(value: float) -> str:
    """At most four digits; never an exponent that a round number does not need."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}".replace("-0", "0") if value == 0 else f"{value:.0f}"
    return f"{value:.4g}"
