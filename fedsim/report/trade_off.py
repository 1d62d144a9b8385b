"""Picture of a sweep's trade-off: what the strongest attack gets, beside the accuracy that is left."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from markupsafe import Markup

from fedsim.base.grouping import group_by
from fedsim.report.charts import NO_GUIDE, ChartPoint, Guide, Look, draw_points
from fedsim.report.setting_names import SettingNames
from fedsim.report.sweep_groups import MIN_SEEDS, Estimate, Labels, ScoreGroup


def draw_trade_off(
    name: str,
    drawn: Sequence[ScoreGroup],
    names: SettingNames,
    sign: int,
    lacking: Collection[Labels],
    attacks: Mapping[Labels, Collection[str]],
    guess: float,
) -> tuple[Markup | str, bool]:
    """Draw leakage by accuracy, colours by the first axis that varies; empty where no setting can be drawn.

    Args:
        name: of the metric, with its unit.
        drawn: the strongest attack of each setting.
        sign: 1 where a higher score is more leakage, else -1.
        lacking: settings that lack scores of some attacks, which get a star.
        attacks: those that each setting has scores of.
        guess: accuracy of the most frequent class; NaN where it is not known.

    Returns:
        The picture, and whether a front is in it.
    """
    if not drawn:
        return "", False
    estimates = []
    for group in drawn:
        ends = sorted((-sign * group.low, -sign * group.high))
        estimates.append((group.accuracy, (-sign * group.mean, ends[0], ends[1])))
    front = pareto_front(estimates, [attacks[group.labels] for group in drawn])
    colour_axis = next((axis for axis, varies in enumerate(names.varying) if varies), 0)
    # Points, with a star where a setting lacks attacks.
    looks: dict[str, Look] = {}
    chart_points, starred = [], set[str]()
    for group, on_front in zip(drawn, front, strict=True):
        colour_label = group.labels[colour_axis] if group.labels else ""
        look = looks.setdefault(colour_label, Look(len(looks)))
        star = "*" if group.labels in lacking else ""
        if star:
            starred.add(colour_label)
        at_guess = " (at the guess)" if group.gain <= 0 else ""
        chart_points.append(
            ChartPoint(
                name=f"{names(group.labels) or 'the only setting'}{star}, {group.name}{at_guess}",
                look=look,
                x=group.accuracy[0],
                y=group.mean,
                # Of two seeds it would reach from nothing to all.
                x_interval=group.accuracy[1:] if group.count[1] >= MIN_SEEDS else (math.nan, math.nan),
                y_interval=(group.low, group.high),
                label=names(group.labels, without=colour_axis) + star,
                marked=on_front,
                href=group.href,
            )
        )
    legend = []
    if names.axes:
        legend = [(f"{label}*" if label in starred else label, look) for label, look in looks.items()]
    picture = draw_points(
        f"Score of the strongest attack by {name}, against accuracy",
        chart_points,
        xlabel="accuracy (fraction correct)",
        ylabel=name,
        legend=legend,
        guide_across=Guide(guess, "most frequent class") if math.isfinite(guess) else NO_GUIDE,
        guide_up=Guide(_mean_floor(drawn), "best guess"),
    )
    return picture, any(front)


def _mean_floor(drawn: Sequence[ScoreGroup]) -> float:
    """Return the mean floor of the settings; NaN where there is none."""
    floors = [group.floor for group in drawn if math.isfinite(group.floor)]
    return math.fsum(floors) / len(floors) if floors else math.nan


def strongest_attacks(score_groups: Sequence[ScoreGroup], sign: int) -> list[ScoreGroup]:
    """Return for each setting the attack that has the best mean; baselines are no attacks."""
    by_setting = group_by((group for group in score_groups if not group.baseline), lambda group: group.labels)
    return [max(attacks, key=lambda group: sign * group.mean) for attacks in by_setting.values()]


def pareto_front(values: Sequence[tuple[Estimate, Estimate]], attacks: Sequence[Collection[str]]) -> list[bool]:
    """Return for each pair whether no other is better beyond uncertainty; more is better.

    Another is better where it is in one of both with the whole of its interval, and no worse in the
    other. Where none is better than any, there is no front, and all are False.

    Args:
        values: accuracy and secrecy of each setting, each with its 95 % interval.
        attacks: those that each was attacked by. Only what was attacked by at least the same can beat a setting, since
            fewer attacks find less.

    >>> sure = lambda value: (value, value - 0.01, value + 0.01)
    >>> settings = [(sure(0.9), sure(0.1)), (sure(0.5), sure(0.5)), (sure(0.4), sure(0.4))]
    >>> pareto_front(settings, [["sme"], ["sme"], ["sme"]])
    [True, True, False]
    """
    settings = [(value, set(names)) for value, names in zip(values, attacks, strict=True)]
    on_front = []
    for value, names in settings:
        is_beaten = any(_dominates(rival, value) and rival_names >= names for rival, rival_names in settings)
        on_front.append(not is_beaten)
    return on_front if not all(on_front) else [False] * len(on_front)


def _dominates(rival: tuple[Estimate, Estimate], value: tuple[Estimate, Estimate]) -> bool:
    is_beyond = any(mine[1] > other[2] for mine, other in zip(rival, value, strict=True))
    return is_beyond and all(mine[0] >= other[0] for mine, other in zip(rival, value, strict=True))
