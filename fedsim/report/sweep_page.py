"""Page of a sweep: the answer, leakage beside accuracy, attacks by setting, curves along the axes, and every cell."""

from __future__ import annotations

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsim.base.errors import RunError
from fedsim.base.files import write_text
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.knowledge import FACTS
from fedsim.interfaces.metric import describe_metric
from fedsim.report.charts import Curve, HeatMapCell, Look, draw_curves, draw_heat_map
from fedsim.report.html import render_page
from fedsim.report.next_steps import suggest_after_sweep
from fedsim.report.reproduction_needs import metric_origins, sweep_origins
from fedsim.report.setting_names import SettingNames, is_number
from fedsim.report.sweep_answer import answer_sweep
from fedsim.report.sweep_groups import Labels, Row, ScoreGroup, group_scores, report_address
from fedsim.report.trade_off import draw_trade_off, strongest_attacks
from fedsim.sweeps.labels import NONE
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
        direction: which values mean that more leaked.
        trade_off: leakage against accuracy; empty where no setting can be drawn.
        has_front: whether some setting in it is better than another beyond uncertainty.
        perfect: settings that are not in it, because the score is infinite.
        unmeasured: whether settings are not in it, because the accuracy was not measured.
        lacking: settings in it without scores of attacks that others there have, each with these attacks.
        attacked: whether any scores are of attacks, not of baselines.
    """

    name: str
    direction: str
    trade_off: Markup | str
    has_front: bool
    perfect: Sequence[str]
    unmeasured: bool
    lacking: Sequence[str]
    attacked: bool
    heat: Markup
    along: Sequence[Markup]


def is_app_sweep(folder: Path, rows: Iterable[Row]) -> bool:
    """Return whether the cells of a sweep run a Flower app."""
    runs = {row["run"] for row in rows if row["run"]}
    return any(RunFolder(folder / run).app.is_file() for run in runs)


def write_sweep_page(folder: Path) -> Path:
    """Write `sweep.html` into the folder of a sweep, from its tables alone."""
    scores, cells = read_table(folder), read_cells(folder)
    file, tables = read_sweep_file(folder)
    answer = answer_sweep(scores.rows, cells.rows, scores.axes)
    # One section for each metric about leakage, that of the answer first.
    first_rows: dict[str, Row] = {}
    for row in scores.rows:
        first_rows.setdefault(row["metric"], row)
    order = sorted(first_rows, key=lambda metric: metric != answer.metric)
    sections = []
    for metric in order:
        score_groups = group_scores(scores.rows, scores.axes, metric) if not describe_metric(metric).meaning else []
        if score_groups:
            sections.append(_section(metric, score_groups, scores.axes, first_rows[metric]["better"], answer.guess))
    text = render_page(
        "sweep.html.j2",
        SCRIPTS,
        name=folder.resolve().name,
        axes=[*scores.axes, "attack", "seed"],
        sections=sections,
        states=_count_states(cells.rows),
        added=sum(row["added"] == "1" for row in cells.rows),
        answer=answer,
        next_steps=suggest_after_sweep(
            answer,
            knows_defenses=knows_defenses(scores.rows),
            is_app=is_app_sweep(folder, scores.rows),
            tables=tables,
        ),
        cells=[row | {"href": report_address(row["run"])} for row in cells.rows],
        file=file,
        grants=list_unusual_grants(tables),
        requirements=sweep_origins(tables) + metric_origins(first_rows),
    )
    write_text(folder / PAGE, text)
    return folder / PAGE


def read_sweep_file(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the file in the folder of a sweep, as text and as tables."""
    try:
        file = (folder / FILE).read_text(encoding="utf-8")
        return file, tomllib.loads(file)
    except (OSError, ValueError, RecursionError) as error:  # no file, no UTF-8 or no TOML
        raise RunError(f"{folder / FILE}: cannot be read ({error}); the same `fedsim sweep` writes it again") from error


def knows_defenses(rows: Sequence[Row]) -> bool:
    """Return whether any adversary of a sweep knows the defenses."""
    return any(row["knows_defenses"] == "1" for row in rows)


def list_unusual_grants(tables: Mapping[str, Any]) -> list[str]:
    """Return what a sweep file grants the adversaries of all its cells beyond what is usual, in words.

    >>> list_unusual_grants({"adversary": {"knowledge": {"labels": True, "model": True}}})
    ['labels']
    """
    knowledge = tables.get("adversary", {}).get("knowledge", {})
    unusual = [name for name, fact in FACTS.items() if not fact.granted_by_default and knowledge.get(name)]
    return [name.replace("_", " ") for name in unusual]


def _count_states(cells: Sequence[Row]) -> list[tuple[str, int]]:
    return list(Counter(row["state"] for row in cells).items())


def _section(
    metric: str, score_groups: Sequence[ScoreGroup], axes: Sequence[str], better: str, guess: float
) -> MetricSection:
    name, sign = describe_metric(metric).label, 1 if better == "higher" else -1
    names = SettingNames.from_labels(axes, [group.labels for group in score_groups])
    # Settings that can be drawn against accuracy, by their strongest attack.
    strongest = strongest_attacks(score_groups, sign)
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
    trade_off, has_front = draw_trade_off(name, drawn, names, sign, lacking, attacks, guess)
    return MetricSection(
        name=name,
        direction=better,
        trade_off=trade_off,
        has_front=has_front,
        perfect=perfect,
        unmeasured=len(measured) < len(strongest),
        lacking=[f"{names(labels)} (no {', '.join(missing)})" for labels, missing in lacking.items()],
        attacked=bool(strongest),
        heat=_heat(name, score_groups, names),
        along=[chart for axis in range(len(axes)) for chart in _charts_along(name, score_groups, names, axis)],
    )


def _attacks_by_setting(score_groups: Sequence[ScoreGroup]) -> dict[Labels, set[str]]:
    """Return by setting the attacks that have scores; an adaptive form counts as the attack, for it needs a defense."""
    attacks: dict[Labels, set[str]] = defaultdict(set)
    for group in score_groups:
        if not group.baseline:
            attacks[group.labels].add(group.attack)
    return attacks


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
        title += "; baselines, which are not attacks, have no colour"
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
    score_groups = [group for group in score_groups if group.labels[axis] != NONE]  # no strength of a defense
    if not names.varying[axis] or not all(is_number(group.labels[axis]) for group in score_groups):
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
