"""The page of a sweep: leakage beside accuracy, attacks by what was swept, curves along its axes, and every cell."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsim.errors import RunError
from fedsim.files import write_text
from fedsim.reporting.charts import Cell, Curve, Look, Point, curves, heat_map, points
from fedsim.reporting.html import grouped, page
from fedsim.reporting.summary import NO_LEAKAGE, interval_text, metric_name
from fedsim.reporting.sweep_groups import Group, Labels, Row, accuracy, groups, report_of
from fedsim.sweeps.table import read_cells, read_table

PAGE, FILE = "sweep.html", "sweep.toml"
"""In the folder of a sweep: its page, and the sweep file, with the experiment in it, by which the folder is known."""
SCRIPTS = ("charts.js",)
MOST_CHARTS = 12
"""Along one axis, by one metric; the values of all are in the map above them."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page shows of one metric.

    Attributes:
        name: of the metric.
        direction: which values mean that more leaked.
        trade_off: leakage against accuracy; empty where no setting can be drawn.
        perfect: settings that are not in it, because the score is infinite.
        unmeasured: whether settings are not in it, because nobody measured the accuracy.
        lacking: settings in it without scores of attacks that others there have, each with these attacks.
        attacked: whether any scores are of attacks, not of baselines.
        heat: attacks by settings.
        along: curves.
    """

    name: str
    direction: str
    trade_off: Markup | str
    perfect: Sequence[str]
    unmeasured: bool
    lacking: Sequence[str]
    attacked: bool
    heat: Markup
    along: Sequence[Markup]


def write_sweep_page(folder: Path) -> Path:
    """Write `sweep.html` into the folder of a sweep, from its tables alone.

    Args:
        folder: with `sweep.csv`, `cells.csv` and `sweep.toml`.

    Raises:
        RunError: one of them is missing or damaged, or the folder cannot be written.
    """
    scores, cells = read_table(folder), read_cells(folder)
    try:
        file = (folder / FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RunError(f"{folder / FILE}: cannot be read ({error}); the same `fedsim sweep` writes it again") from error
    shown = {
        metric: (found, row["better"])
        for metric, row in {row["metric"]: row for row in reversed(scores.rows)}.items()
        if metric not in NO_LEAKAGE and (found := groups(scores.rows, scores.axes, metric))
    }
    order = [metric for metric in dict.fromkeys(row["metric"] for row in scores.rows) if metric in shown]
    text = page(
        "sweep.html.j2",
        SCRIPTS,
        name=folder.resolve().name,
        axes=[*scores.axes, "attack", "seed"],
        sections=[_section(metric, shown[metric][0], scores.axes, shown[metric][1]) for metric in order],
        states=_states(cells.rows),
        settings=_settings(scores.rows, scores.axes),
        cells=[row | {"href": report_of(row["run"])} for row in cells.rows],
        file=file,
    )
    write_text(folder / PAGE, text)
    return folder / PAGE


def _states(cells: Sequence[Row]) -> list[tuple[str, int]]:
    """How many cells are in each state."""
    return list(Counter(row["state"] for row in cells).items())


def _settings(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Of each setting: accuracy over seeds, epsilon that is proved and measured, bytes; of what differs, the range."""
    found: dict[Labels, list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[axis] for axis in axes)].append(row)
    return [
        {
            "labels": labels,
            "accuracy": _over_seeds(some),
            "proved": _range(row["proved_epsilon"] for row in some),
            "measured": _range(row["measured_epsilon"] for row in some),
            "bytes": _bytes(some),
        }
        for labels, some in found.items()
    ]


def _over_seeds(rows: Sequence[Row]) -> str:
    estimate, seeds = accuracy(rows)
    return f"{interval_text(*estimate)} ({seeds} seed{'s' * (seeds != 1)})" if seeds else ""


def _bytes(rows: Sequence[Row]) -> str:
    """The most that is known; empty where the server saw no single client."""
    known = [float(row["bytes"]) for row in rows if row["bytes"]]
    return grouped(round(max(known))) if known else ""


def _range(texts: Iterable[str]) -> str:
    """The value, or lowest to highest of several; empty where there is none."""
    values = sorted({float(text) for text in texts if text})
    ends = [f"{value:.4g}" for value in (values[0], values[-1])] if values else []
    return " to ".join(dict.fromkeys(ends))


def _section(metric: str, found: Sequence[Group], axes: Sequence[str], better: str) -> Section:
    name, sign = metric_name(metric), 1 if better == "higher" else -1
    names = Names.of(axes, found)
    strongest = _strongest(found, sign)
    measured = [one for one in strongest if math.isfinite(one.accuracy[0])]
    drawn = [one for one in measured if math.isfinite(one.mean)]
    attacks = _attacks(found)
    made = dict.fromkeys(attack for one in drawn for attack in attacks[one.labels])
    lacking = {one.labels: [attack for attack in made if attack not in attacks[one.labels]] for one in drawn}
    lacking = {labels: some for labels, some in lacking.items() if some}
    return Section(
        name=name,
        direction=better,
        trade_off=_trade_off(name, drawn, names, sign, attacks, lacking),
        perfect=[
            f"{names(one.labels) or 'the only setting'} ({one.name})" for one in strongest if math.isinf(one.mean)
        ],
        unmeasured=len(measured) < len(strongest),
        lacking=[f"{names(labels)} (no {', '.join(some)})" for labels, some in lacking.items()],
        attacked=bool(strongest),
        heat=_heat(name, found, names),
        along=[chart for place in range(len(axes)) for chart in _along(name, found, names, place)],
    )


def _strongest(found: Sequence[Group], sign: int) -> list[Group]:
    """Of each setting, the attack that has the best mean; baselines are no attacks."""
    by_setting: dict[Labels, list[Group]] = defaultdict(list)
    for one in found:
        if not one.baseline:
            by_setting[one.labels].append(one)
    return [max(some, key=lambda one: sign * one.mean) for some in by_setting.values()]


def _attacks(found: Sequence[Group]) -> dict[Labels, set[str]]:
    """By setting, the attacks that have scores; an adaptive form is none of its own, for it needs a defense."""
    made: dict[Labels, set[str]] = defaultdict(set)
    for one in found:
        if not one.baseline:
            made[one.labels].add(one.attack)
    return made


def _trade_off(
    name: str,
    found: Sequence[Group],
    names: Names,
    sign: int,
    attacks: Mapping[Labels, set[str]],
    lacking: Collection[Labels],
) -> Markup | str:
    """Leakage by accuracy, colours by the first axis that varies; nothing where no setting can be drawn."""
    if not found:
        return ""
    front = pareto([(one.accuracy[0], -sign * one.mean) for one in found], [attacks[one.labels] for one in found])
    first = next((place for place, varies in enumerate(names.varying) if varies), 0)

    def kind(one: Group) -> str:
        return one.labels[first] if one.labels else ""

    looks = {label: Look(at) for at, label in enumerate(dict.fromkeys(map(kind, found)))}
    shown = [
        Point(
            name=f"{names(one.labels) or 'the only setting'}{'*' * (one.labels in lacking)}, {one.name}",
            look=looks[kind(one)],
            x=one.accuracy[0],
            y=one.mean,
            x_interval=one.accuracy[1:],
            y_interval=(one.low, one.high),
            label=names(one.labels, without=first) + "*" * (one.labels in lacking),
            marked=on_front,
            href=one.href,
        )
        for one, on_front in zip(found, front, strict=True)
    ]
    title = f"What the strongest attack gets, by {name}, and which accuracy is left"
    starred = {kind(one) for one in found if one.labels in lacking}
    legend = [(label + "*" * (label in starred), look) for label, look in looks.items()] if names.axes else []
    return points(title, shown, xlabel="accuracy (fraction correct)", ylabel=name, legend=legend)


def pareto(values: Sequence[tuple[float, float]], attacks: Sequence[Collection[str]]) -> list[bool]:
    """Of each pair, whether no other is at least as good in both and better in one; more is better.

    Args:
        values: accuracy and secrecy of each setting.
        attacks: those that each was attacked by. Only what was attacked by at least the same can beat a setting, since
            fewer attacks find less.
    """
    settings = [(value, set(some)) for value, some in zip(values, attacks, strict=True)]
    return [
        not any(
            other != own and other[0] >= own[0] and other[1] >= own[1] and theirs >= ours for other, theirs in settings
        )
        for own, ours in settings
    ]


def _heat(name: str, found: Sequence[Group], names: Names) -> Markup:
    """Attacks by settings; a darker cell leaks more, from the floor on. Baselines are not coloured."""
    settings = list(dict.fromkeys(one.labels for one in found))
    by_place = {(one.who, one.labels): one for one in found}
    most = max((one.gain for one in found if math.isfinite(one.gain) and not one.baseline), default=0.0)
    attacks = _beside_naive(found)
    cells = [[_cell(by_place.get((who, labels)), most) for labels in settings] for who in attacks]
    columns = [names(labels) or "score" for labels in settings]
    title = f"{name}: mean over victims and seeds; a darker cell is further beyond the best guess"
    if any(one.baseline for one in found):
        title += "; baselines, which are no attacks, stay plain"
    return heat_map(title, list(attacks.values()), columns, cells, corner="attack")


def _beside_naive(found: Sequence[Group]) -> dict[tuple[str, bool], str]:
    """The names of the attacks, each with its adaptive form after it."""
    names = {one.who: one.name for one in found}
    labels = dict.fromkeys(attack for attack, _ in names)
    return {who: names[who] for label in labels for who in ((label, False), (label, True)) if who in names}


def _cell(one: Group | None, most: float) -> Cell:
    if one is None:
        return Cell(text="–", told="not made, or it failed")
    shade = 1.0 if one.gain == math.inf else one.gain / most if most > 0 else 0.0
    return Cell(text=one.text, shade=0.0 if one.baseline else shade, told=one.told, href=one.href)


def _along(name: str, found: Sequence[Group], names: Names, place: int) -> list[Markup]:
    """Charts along an axis whose labels are numbers, one for each other setting, with a curve an attack; else none."""
    if not names.varying[place] or not all(_is_number(one.labels[place]) for one in found):
        return []
    looks = {who: Look(at) for at, who in enumerate(_beside_naive(found))}
    values = [value for one in found if math.isfinite(one.mean) for value in _band(one)]
    others: dict[str, dict[tuple[str, bool], list[Group]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if math.isfinite(one.mean):
            others[names(one.labels, without=place)][one.who].append(one)
    return [
        curves(
            ", ".join(filter(None, (f"{name} along {names.axes[place]}", other))),
            [_curve(looks[who], some, place) for who, some in by_attack.items()],
            xlabel=names.axes[place],
            ylabel=name,
            limits=(min(values), max(values)),
            legend=True,
        )
        for other, by_attack in [*others.items()][:MOST_CHARTS]
    ]


def _curve(look: Look, found: Sequence[Group], place: int) -> Curve:
    ordered = sorted(found, key=lambda one: float(one.labels[place]))
    low, high = zip(*map(_band, ordered), strict=True)
    return Curve(
        name=ordered[0].name,
        look=look,
        x=[float(one.labels[place]) for one in ordered],
        y=[one.mean for one in ordered],
        low=low,
        high=high,
    )


def _band(one: Group) -> tuple[float, float]:
    """The interval, without width where there is none."""
    return (one.mean, one.mean) if math.isnan(one.low) else (one.low, one.high)


@dataclass(frozen=True)
class Names:
    """What settings are called: the labels of the axes that vary, each number with the name of its axis."""

    axes: Sequence[str]
    varying: Sequence[bool]

    @classmethod
    def of(cls, axes: Sequence[str], found: Iterable[Group]) -> Names:
        """For these settings."""
        settings = {one.labels for one in found}
        return cls(axes, [len({labels[place] for labels in settings}) > 1 for place in range(len(axes))])

    def __call__(self, labels: Labels, without: int = -1) -> str:
        """The name of a setting; `without` is an axis that it leaves out."""
        told = [
            f"{axis.rpartition('.')[2]} {label}" if _is_number(label) else label
            for place, (axis, varies, label) in enumerate(zip(self.axes, self.varying, labels, strict=True))
            if varies and place != without
        ]
        return ", ".join(told)


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
