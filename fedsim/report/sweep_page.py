"""Page of a sweep: leakage beside accuracy, attacks by setting, curves along the axes, and every cell."""

from __future__ import annotations

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsim.base.errors import RunError
from fedsim.base.files import write_text
from fedsim.interfaces.metric import describe_metric
from fedsim.report.charts import ChartPoint, Curve, HeatMapCell, Look, draw_curves, draw_heat_map, draw_points
from fedsim.report.html import group_digits, render_page
from fedsim.report.reproduction_needs import metric_origins, sweep_origins
from fedsim.report.summary import interval_text, number_of
from fedsim.report.sweep_groups import Labels, Row, ScoreGroup, accuracy, group_scores, report_address
from fedsim.sweeps.table import read_cells, read_table

PAGE, FILE = "sweep.html", "sweep.toml"
"""Names in the folder of a sweep: its page, and the sweep file with the experiment, which marks it as such a folder."""
SCRIPTS = ("charts.js",)
MOST_CHARTS = 12
"""Most charts along one axis by one metric; the values of all settings are in the heat map above them."""
_AttackForm = tuple[str, bool]
"""An attack, and whether it is adaptive; see `ScoreGroup.attack_and_form`."""


@dataclass(frozen=True, kw_only=True)
class MetricSection:
    """Part of the page about one metric.

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
        tables = tomllib.loads(file)
    except (OSError, ValueError, RecursionError) as error:  # no file, no UTF-8 or no TOML
        raise RunError(f"{folder / FILE}: cannot be read ({error}); the same `fedsim sweep` writes it again") from error
    # One section for each metric about leakage, in the order of the table.
    first_rows: dict[str, Row] = {}
    for row in scores.rows:
        first_rows.setdefault(row["metric"], row)
    sections = []
    for metric, first_row in first_rows.items():
        score_groups = group_scores(scores.rows, scores.axes, metric) if not describe_metric(metric).meaning else []
        if score_groups:
            sections.append(_section(metric, score_groups, scores.axes, first_row["better"]))
    text = render_page(
        "sweep.html.j2",
        SCRIPTS,
        name=folder.resolve().name,
        axes=[*scores.axes, "attack", "seed"],
        sections=sections,
        states=_count_states(cells.rows),
        settings=_settings(scores.rows, scores.axes),
        cells=[row | {"href": report_address(row["run"])} for row in cells.rows],
        file=file,
        requirements=sweep_origins(tables) + metric_origins(first_rows),
    )
    write_text(folder / PAGE, text)
    return folder / PAGE


def _count_states(cells: Sequence[Row]) -> list[tuple[str, int]]:
    return list(Counter(row["state"] for row in cells).items())


def _settings(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Describe each setting: accuracy over seeds, proved and measured epsilon as ranges, bytes that clients send."""
    rows_by_setting: dict[Labels, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_setting[tuple(row[axis] for axis in axes)].append(row)
    return [
        {
            "labels": labels,
            "accuracy": _accuracy_text(setting_rows),
            "proved": _range_text(row["proved_epsilon"] for row in setting_rows),
            "measured": _range_text(row["measured_epsilon"] for row in setting_rows),
            "bytes": _bytes_text(setting_rows),
        }
        for labels, setting_rows in rows_by_setting.items()
    ]


def _accuracy_text(rows: Sequence[Row]) -> str:
    estimate, seeds = accuracy(rows)
    return f"{interval_text(*estimate)} ({number_of(seeds, 'seed')})" if seeds else ""


def _bytes_text(rows: Sequence[Row]) -> str:
    """Format the largest number of bytes; empty where the server saw no single client."""
    sizes = [float(row["bytes"]) for row in rows if row["bytes"]]
    return group_digits(round(max(sizes))) if sizes else ""


def _range_text(texts: Iterable[str]) -> str:
    """Format the value, or lowest to highest of several; empty where there is none."""
    values = sorted({float(text) for text in texts if text})
    ends = [f"{value:.4g}" for value in (values[0], values[-1])] if values else []
    return " to ".join(dict.fromkeys(ends))


def _section(metric: str, score_groups: Sequence[ScoreGroup], axes: Sequence[str], better: str) -> MetricSection:
    name, sign = describe_metric(metric).label, 1 if better == "higher" else -1
    names = SettingNames.from_groups(axes, score_groups)
    # Settings that can be drawn against accuracy, by their strongest attack.
    strongest = _strongest_attacks(score_groups, sign)
    measured = [group for group in strongest if math.isfinite(group.accuracy[0])]
    drawn = [group for group in measured if math.isfinite(group.mean)]
    perfect = []
    for group in strongest:
        if math.isinf(group.mean):
            perfect.append(f"{names(group.labels) or 'the only setting'} ({group.name})")
    # Attacks that some of these settings lack.
    attacks = _attacks_by_setting(score_groups)
    attacks_drawn = dict.fromkeys(attack for group in drawn for attack in attacks[group.labels])
    lacking = {}
    for group in drawn:
        missing = [attack for attack in attacks_drawn if attack not in attacks[group.labels]]
        if missing:
            lacking[group.labels] = missing
    return MetricSection(
        name=name,
        direction=better,
        trade_off=_trade_off(name, drawn, names, sign, attacks, lacking),
        perfect=perfect,
        unmeasured=len(measured) < len(strongest),
        lacking=[f"{names(labels)} (no {', '.join(missing)})" for labels, missing in lacking.items()],
        attacked=bool(strongest),
        heat=_heat(name, score_groups, names),
        along=[chart for axis in range(len(axes)) for chart in _charts_along(name, score_groups, names, axis)],
    )


def _strongest_attacks(score_groups: Sequence[ScoreGroup], sign: int) -> list[ScoreGroup]:
    """Return for each setting the attack that has the best mean; baselines are no attacks."""
    by_setting: dict[Labels, list[ScoreGroup]] = defaultdict(list)
    for group in score_groups:
        if not group.baseline:
            by_setting[group.labels].append(group)
    return [max(attacks, key=lambda group: sign * group.mean) for attacks in by_setting.values()]


def _attacks_by_setting(score_groups: Sequence[ScoreGroup]) -> dict[Labels, set[str]]:
    """Return by setting the attacks that have scores; an adaptive form counts as the attack, for it needs a defense."""
    attacks: dict[Labels, set[str]] = defaultdict(set)
    for group in score_groups:
        if not group.baseline:
            attacks[group.labels].add(group.attack)
    return attacks


def _trade_off(
    name: str,
    drawn: Sequence[ScoreGroup],
    names: SettingNames,
    sign: int,
    attacks: Mapping[Labels, set[str]],
    lacking: Collection[Labels],
) -> Markup | str:
    """Draw leakage by accuracy, colours by the first axis that varies; empty where no setting can be drawn."""
    if not drawn:
        return ""
    accuracy_and_secrecy = [(group.accuracy[0], -sign * group.mean) for group in drawn]
    front = pareto_front(accuracy_and_secrecy, [attacks[group.labels] for group in drawn])
    colour_axis = next((axis for axis, varies in enumerate(names.varying) if varies), 0)

    def colour_label(group: ScoreGroup) -> str:
        return group.labels[colour_axis] if group.labels else ""

    looks = {label: Look(number) for number, label in enumerate(dict.fromkeys(map(colour_label, drawn)))}
    chart_points, starred = [], set[str]()
    for group, on_front in zip(drawn, front, strict=True):
        star = "*" if group.labels in lacking else ""
        if star:
            starred.add(colour_label(group))
        chart_points.append(
            ChartPoint(
                name=f"{names(group.labels) or 'the only setting'}{star}, {group.name}",
                look=looks[colour_label(group)],
                x=group.accuracy[0],
                y=group.mean,
                x_interval=group.accuracy[1:],
                y_interval=(group.low, group.high),
                label=names(group.labels, without=colour_axis) + star,
                marked=on_front,
                href=group.href,
            )
        )
    title = f"What the strongest attack gets, by {name}, and which accuracy is left"
    legend = []
    if names.axes:
        legend = [(f"{label}*" if label in starred else label, look) for label, look in looks.items()]
    return draw_points(title, chart_points, xlabel="accuracy (fraction correct)", ylabel=name, legend=legend)


def pareto_front(values: Sequence[tuple[float, float]], attacks: Sequence[Collection[str]]) -> list[bool]:
    """Return for each pair whether no other is at least as good in both and better in one; more is better.

    Args:
        values: accuracy and secrecy of each setting.
        attacks: those that each was attacked by. Only what was attacked by at least the same can beat a setting, since
            fewer attacks find less.

    >>> pareto_front([(0.9, 0.1), (0.5, 0.5), (0.4, 0.4)], [["sme"], ["sme"], ["sme"]])
    [True, True, False]
    """
    settings = [(value, set(names)) for value, names in zip(values, attacks, strict=True)]

    def beats(rival: tuple[float, float], value: tuple[float, float]) -> bool:
        return rival != value and rival[0] >= value[0] and rival[1] >= value[1]

    on_front = []
    for value, names in settings:
        is_beaten = any(beats(rival, value) and rival_names >= names for rival, rival_names in settings)
        on_front.append(not is_beaten)
    return on_front


def _heat(name: str, score_groups: Sequence[ScoreGroup], names: SettingNames) -> Markup:
    """Draw attacks by settings; a darker cell leaks more, from the floor on. Baselines are not coloured."""
    settings = list(dict.fromkeys(group.labels for group in score_groups))
    by_attack_and_setting = {(group.attack_and_form, group.labels): group for group in score_groups}
    finite_gains = [group.gain for group in score_groups if math.isfinite(group.gain) and not group.baseline]
    max_gain = max(finite_gains, default=0.0)
    attack_names = _attack_names(score_groups)
    cells = []
    for attack in attack_names:
        cells.append([_cell(by_attack_and_setting.get((attack, labels)), max_gain) for labels in settings])
    columns = [names(labels) or "score" for labels in settings]
    title = f"{name}: mean over victims and seeds; a darker cell is further beyond the best guess"
    if any(group.baseline for group in score_groups):
        title += "; baselines, which are no attacks, stay plain"
    return draw_heat_map(title, list(attack_names.values()), columns, cells, corner="attack")


def _attack_names(score_groups: Sequence[ScoreGroup]) -> dict[_AttackForm, str]:
    """Return the names of the attacks, each with its adaptive form after it."""
    names = {group.attack_and_form: group.name for group in score_groups}
    ordered = {}
    for attack in dict.fromkeys(attack for attack, _ in names):
        for form in ((attack, False), (attack, True)):
            if form in names:
                ordered[form] = names[form]
    return ordered


def _cell(group: ScoreGroup | None, max_gain: float) -> HeatMapCell:
    if group is None:
        return HeatMapCell(text="–", tooltip="not made, or it failed")
    if group.baseline:
        shade = 0.0
    elif group.gain == math.inf:
        shade = 1.0
    else:
        shade = group.gain / max_gain if max_gain > 0 else 0.0
    return HeatMapCell(text=group.text, shade=shade, tooltip=group.tooltip, href=group.href)


def _charts_along(name: str, score_groups: Sequence[ScoreGroup], names: SettingNames, axis: int) -> list[Markup]:
    """Draw charts along an axis whose labels are numbers, one for each other setting, with a curve for each attack.

    Empty where the labels of the axis are not numbers, or do not vary.
    """
    if not names.varying[axis] or not all(_is_number(group.labels[axis]) for group in score_groups):
        return []
    looks = {attack: Look(number) for number, attack in enumerate(_attack_names(score_groups))}
    finite = [group for group in score_groups if math.isfinite(group.mean)]
    values = [value for group in finite for value in _band(group)]
    charts: dict[str, dict[_AttackForm, list[ScoreGroup]]] = defaultdict(lambda: defaultdict(list))
    for group in finite:
        charts[names(group.labels, without=axis)][group.attack_and_form].append(group)
    drawn = []
    for other_labels, groups_by_attack in list(charts.items())[:MOST_CHARTS]:
        title = f"{name} along {names.axes[axis]}"
        drawn.append(
            draw_curves(
                f"{title}, {other_labels}" if other_labels else title,
                [_curve(looks[attack], attack_groups, axis) for attack, attack_groups in groups_by_attack.items()],
                xlabel=names.axes[axis],
                ylabel=name,
                limits=(min(values), max(values)),
                legend=True,
            )
        )
    return drawn


def _curve(look: Look, score_groups: Sequence[ScoreGroup], axis: int) -> Curve:
    ordered = sorted(score_groups, key=lambda group: float(group.labels[axis]))
    low, high = zip(*map(_band, ordered), strict=True)
    return Curve(
        name=ordered[0].name,
        look=look,
        x=[float(group.labels[axis]) for group in ordered],
        y=[group.mean for group in ordered],
        low=low,
        high=high,
    )


def _band(group: ScoreGroup) -> tuple[float, float]:
    """Return the interval of a mean, without width where there is none."""
    return (group.mean, group.mean) if math.isnan(group.low) else (group.low, group.high)


@dataclass(frozen=True)
class SettingNames:
    """Names of settings: the labels of the axes that vary, each number with the name of its axis."""

    axes: Sequence[str]
    varying: Sequence[bool]

    @classmethod
    def from_groups(cls, axes: Sequence[str], score_groups: Iterable[ScoreGroup]) -> SettingNames:
        """Return the names of the settings of these groups."""
        settings = {group.labels for group in score_groups}
        return cls(axes, [len({labels[axis] for labels in settings}) > 1 for axis in range(len(axes))])

    def __call__(self, labels: Labels, without: int = -1) -> str:
        """Return the name of a setting; `without` is an axis that it leaves out."""
        words = []
        for number, (axis, varies, label) in enumerate(zip(self.axes, self.varying, labels, strict=True)):
            if varies and number != without:
                words.append(f"{axis.rpartition('.')[2]} {label}" if _is_number(label) else label)
        return ", ".join(words)


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
