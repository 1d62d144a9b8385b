"""The page of a sweep: leakage beside accuracy, attacks by what was swept, curves along its axes, and every cell."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fedsim.auditing.plan import ADAPTIVE
from fedsim.errors import RunError
from fedsim.evaluation.statistics import mean_and_margin, mean_text
from fedsim.files import write_text
from fedsim.reporting.charts import Cell, Curve, Look, Point, curves, heat_map, points
from fedsim.reporting.html import grouped, page
from fedsim.reporting.summary import NO_LEAKAGE, metric_name
from fedsim.sweeps.table import read_cells, read_table

PAGE, FILE = "sweep.html", "sweep.toml"
SCRIPTS = ("charts.js",)
MOST_CHARTS = 12
"""Along one axis, by one metric; the values of all are in the map above them."""
Labels = tuple[str, ...]
Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The scores of one attack by one metric, of all victims and seeds of one setting.

    Attributes:
        attack: its label, followed by `adaptive` where it knows the defenses.
        labels: of the axes, without attack and seed.
        mean: over victims and seeds, each the mean over rounds and random starts; may be infinite.
        margin: half the 95 % interval of the mean; 0 where there is one value, or where it is not finite.
        floor: mean of what the best guess gets; NaN where there is none.
        gain: mean advantage over the floor, towards leakage.
        count: how many victims, and in how many seeds.
        accuracy: of the model: mean over seeds, and half its interval; NaN where it was not measured.
        href: of a run's report, the first seed's.
    """

    attack: str
    labels: Labels
    mean: float
    margin: float
    floor: float
    gain: float
    count: tuple[int, int]
    accuracy: tuple[float, float]
    href: str

    @property
    def text(self) -> str:
        """Mean and margin, as everywhere on the page."""
        return f"{self.mean:.4g}" + (f" ± {self.margin:.2g}" if self.margin else "")

    @property
    def told(self) -> str:
        """What a tooltip adds."""
        floor = "no floor to compare with" if math.isnan(self.floor) else f"the best guess gets {self.floor:.4g}"
        victims, seeds = self.count
        return f"{victims} victim{'s' * (victims != 1)}, {seeds} seed{'s' * (seeds != 1)}; {floor}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page shows of one metric.

    Attributes:
        name: of the metric.
        direction: which values mean that more leaked.
        trade_off: leakage against accuracy; empty where no setting can be drawn.
        perfect: settings that are not in it, because the score is infinite.
        unmeasured: whether settings are not in it, because nobody measured the accuracy.
        heat: attacks by settings.
        along: curves.
    """

    name: str
    direction: str
    trade_off: Markup | str
    perfect: Sequence[str]
    unmeasured: bool
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
        cells=[row | {"href": _report(row["run"])} for row in cells.rows],
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
            "bytes": grouped(round(max(float(row["bytes"] or 0) for row in some))),
        }
        for labels, some in found.items()
    ]


def _over_seeds(rows: Sequence[Row]) -> str:
    measured = _accuracies(rows)
    return f"{mean_text(measured)} ({len(measured)} seed{'s' * (len(measured) != 1)})" if measured else ""


def _accuracies(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    return {("server", row["seed"]): float(row["accuracy"]) for row in rows if row["accuracy"]}


def _range(texts: Iterable[str]) -> str:
    """The value, or lowest to highest of several; empty where there is none."""
    values = sorted({float(text) for text in texts if text})
    ends = [f"{value:.4g}" for value in (values[0], values[-1])] if values else []
    return " to ".join(dict.fromkeys(ends))


def groups(rows: Sequence[Row], axes: Sequence[str], metric: str) -> list[Group]:
    """One for each attack and setting that have scores by `metric`, in the order of the table."""
    found: dict[tuple[str, Labels], list[Row]] = defaultdict(list)
    for row in rows:
        if row["metric"] == metric and row["value"]:
            found[_attack(row), tuple(row[axis] for axis in axes)].append(row)
    return [_group(attack, labels, some) for (attack, labels), some in found.items()]


def _attack(row: Row) -> str:
    return f"{row['attack']} {ADAPTIVE}" if row["knows_defenses"] == "1" else row["attack"]


def _group(attack: str, labels: Labels, rows: Sequence[Row]) -> Group:
    values, floors = _by_victim(rows, "value"), _by_victim(rows, "floor")
    finite = all(map(math.isfinite, values.values()))
    mean, margin = mean_and_margin(values) if finite else (sum(values.values()) / len(values), 0.0)
    floor = sum(floors.values()) / len(floors) if floors else math.nan
    measured = _accuracies(rows)
    return Group(
        attack=attack,
        labels=labels,
        mean=mean,
        margin=margin,
        floor=floor,
        gain=mean - floor if rows[0]["better"] == "higher" else floor - mean,
        count=(len({victim for victim, _ in values}), len({seed for _, seed in values})),
        accuracy=mean_and_margin(measured) if measured else (math.nan, 0.0),
        href=_report(rows[0]["run"]),
    )


def _by_victim(rows: Iterable[Row], column: str) -> dict[tuple[str, str], float]:
    """By victim and seed, the mean over rounds and random starts."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[column]:
            found[row["victim"], row["seed"]].append(float(row[column]))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _section(metric: str, found: Sequence[Group], axes: Sequence[str], better: str) -> Section:
    name, sign = metric_name(metric), 1 if better == "higher" else -1
    names = Names.of(axes, found)
    strongest = _strongest(found, sign)
    measured = [one for one in strongest if math.isfinite(one.accuracy[0])]
    return Section(
        name=name,
        direction=better,
        trade_off=_trade_off(name, [one for one in measured if math.isfinite(one.mean)], names, sign),
        perfect=[
            f"{names(one.labels) or 'the only setting'} ({one.attack})" for one in strongest if math.isinf(one.mean)
        ],
        unmeasured=len(measured) < len(strongest),
        heat=_heat(name, found, names),
        along=[chart for place in range(len(axes)) for chart in _along(name, found, names, place)],
    )


def _strongest(found: Sequence[Group], sign: int) -> list[Group]:
    """Of each setting, the attack that has the best mean."""
    by_setting: dict[Labels, list[Group]] = defaultdict(list)
    for one in found:
        by_setting[one.labels].append(one)
    return [max(some, key=lambda one: sign * one.mean) for some in by_setting.values()]


def _trade_off(name: str, found: Sequence[Group], names: Names, sign: int) -> Markup | str:
    """Leakage by accuracy, colours by the first axis that varies; nothing where no setting can be drawn."""
    if not found:
        return ""
    front = pareto([(one.accuracy[0], -sign * one.mean) for one in found])
    first = next((place for place, varies in enumerate(names.varying) if varies), 0)

    def kind(one: Group) -> str:
        return one.labels[first] if one.labels else ""

    looks = {label: Look(at) for at, label in enumerate(dict.fromkeys(map(kind, found)))}
    shown = [
        Point(
            name=f"{names(one.labels) or 'the only setting'}, {one.attack}",
            look=looks[kind(one)],
            x=one.accuracy[0],
            y=one.mean,
            x_interval=_ends(*one.accuracy),
            y_interval=_ends(one.mean, one.margin),
            label=names(one.labels, without=first),
            marked=on_front,
            href=one.href,
        )
        for one, on_front in zip(found, front, strict=True)
    ]
    title = f"What the strongest attack gets, by {name}, and which accuracy is left"
    return points(
        title, shown, xlabel="accuracy (fraction correct)", ylabel=name, legend=[*looks.items()] if names.axes else []
    )


def pareto(values: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each pair, whether no other is at least as good in both and better in one; more is better."""
    return [not any(other != own and other[0] >= own[0] and other[1] >= own[1] for other in values) for own in values]


def _ends(mean: float, margin: float) -> tuple[float, float]:
    return (mean - margin, mean + margin) if margin else (math.nan, math.nan)


def _heat(name: str, found: Sequence[Group], names: Names) -> Markup:
    """Attacks by settings; a darker cell leaks more, from the floor on."""
    settings = list(dict.fromkeys(one.labels for one in found))
    by_place = {(one.attack, one.labels): one for one in found}
    most = max((one.gain for one in found if math.isfinite(one.gain)), default=0.0)
    attacks = _beside_naive(found)
    cells = [[_cell(by_place.get((attack, labels)), most) for labels in settings] for attack in attacks]
    columns = [names(labels) or "score" for labels in settings]
    title = f"{name}: mean over victims and seeds; a darker cell is further beyond the best guess"
    return heat_map(title, attacks, columns, cells, corner="attack")


def _beside_naive(found: Sequence[Group]) -> list[str]:
    """The attacks, each with its adaptive form after it."""
    names = list(dict.fromkeys(one.attack for one in found))
    naive = list(dict.fromkeys(name.removesuffix(f" {ADAPTIVE}") for name in names))
    return [name for base in naive for name in (base, f"{base} {ADAPTIVE}") if name in names]


def _cell(one: Group | None, most: float) -> Cell:
    if one is None:
        return Cell(text="–", told="not made, or it failed")
    shade = 1.0 if one.gain == math.inf else one.gain / most if most > 0 else 0.0
    return Cell(text=one.text, shade=shade, told=one.told, href=one.href)


def _along(name: str, found: Sequence[Group], names: Names, place: int) -> list[Markup]:
    """Charts along an axis whose labels are numbers, one for each other setting, with a curve an attack; else none."""
    if not names.varying[place] or not all(_is_number(one.labels[place]) for one in found):
        return []
    attacks = _beside_naive(found)
    values = [
        value for one in found if math.isfinite(one.mean) for value in (one.mean - one.margin, one.mean + one.margin)
    ]
    others: dict[str, dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if math.isfinite(one.mean):
            others[names(one.labels, without=place)][one.attack].append(one)
    return [
        curves(
            ", ".join(filter(None, (f"{name} along {names.axes[place]}", other))),
            [_curve(attack, Look(attacks.index(attack)), some, place) for attack, some in by_attack.items()],
            xlabel=names.axes[place],
            ylabel=name,
            limits=(min(values), max(values)),
            legend=True,
        )
        for other, by_attack in [*others.items()][:MOST_CHARTS]
    ]


def _curve(name: str, look: Look, found: Sequence[Group], place: int) -> Curve:
    ordered = sorted(found, key=lambda one: float(one.labels[place]))
    return Curve(
        name=name,
        look=look,
        x=[float(one.labels[place]) for one in ordered],
        y=[one.mean for one in ordered],
        low=[one.mean - one.margin for one in ordered],
        high=[one.mean + one.margin for one in ordered],
    )


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


def _report(run: str) -> str:
    """The address of a run's report; empty where there is no run."""
    return quote(f"{run}/report.html") if run else ""
