"""The least value of a function on the line between two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

LineFunction = Callable[[Sequence[float]], Sequence[float]]
"""Gives the values at positions on the line, from 0 to 1; several at once may take less time."""


class LinePoint(NamedTuple):
    """Value of such a function, and where it has it."""

    value: float
    position: float


_ACCURACY = 0.001
"""A parabola that gains less than this ends a coarse search, if the one before was right to as much."""
_MAX_PARABOLAS = 3
_LEAST_DISTANCE, _STEP = 0.01, 0.3
"""A parabola whose lowest point is nearer than the first number to the best position says nothing
new; the second number is the share of the way to a neighbour at which it is tried instead."""


def minimise_on_line(function: LineFunction, at_end: float) -> float:
    """Return the least value on the line, of five positions and of a search around the best of them.

    The positions come first because ReLUs and max pooling make functions of a model rugged, where a
    search alone ends in the first valley that it meets.
    """
    from scipy.optimize import minimize_scalar

    positions = np.linspace(0, 1, 5)
    values = [*function(positions[:-1].tolist()), at_end]
    best = int(np.argmin(values))
    ends = positions[max(best - 1, 0)], positions[min(best + 1, len(positions) - 1)]
    searched = minimize_scalar(
        lambda position: function([float(position)])[0], bounds=ends, method="bounded", options={"xatol": 0.02}
    )
    return min(float(searched.fun), *values)


def minimise_coarsely(function: LineFunction, at_end: float, rival: LinePoint | None = None) -> LinePoint:
    """Return a point of the line whose value is never below the least one, and near it on smooth lines.

    Parabolas lead through the best position and its neighbours, until one has foretold a value and
    gains little. This takes about four evaluations, a third of `minimise_on_line`.

    >>> value, position = minimise_coarsely(lambda alphas: [(alpha - 0.4) ** 2 for alpha in alphas], 0.36)
    >>> round(value, 6), round(position, 6)
    (0.0, 0.4)

    Args:
        rival: low point of another function. Where `function` is no lower there, the search ends with
            this one evaluation: what counts is the lower one of both.
    """
    values = {1.0: at_end}
    if rival is not None:
        if rival.position not in values:
            (values[rival.position],) = function([rival.position])
        if min(values.values()) > rival.value - _ACCURACY:
            return _find_lowest(values)
    first_positions = [position for position in (0.0, 0.5) if position not in values]
    values.update(zip(first_positions, function(first_positions), strict=True))
    error = math.inf
    for _ in range(_MAX_PARABOLAS):
        position, expected, gain = _follow_parabola(values, needs_distance=error > _ACCURACY)
        if position in values or max(gain, error) <= _ACCURACY:
            break
        (values[position],) = function([position])
        error = abs(values[position] - expected)
    return _find_lowest(values)


def _find_lowest(values: Mapping[float, float]) -> LinePoint:
    position = min(values, key=lambda position: values[position])
    return LinePoint(values[position], position)


def _follow_parabola(values: Mapping[float, float], *, needs_distance: bool) -> tuple[float, float, float]:
    """Return where a parabola leads, the value that it expects there, and its gain at its lowest point.

    Args:
        needs_distance: whether the next position is at some distance from the best one.
    """
    best = min(values, key=lambda position: values[position])
    positions = sorted(values)
    middle = min(max(positions.index(best), 1), len(positions) - 2)
    left, centre, right = positions[middle - 1 : middle + 2]
    # Newton's form of the parabola through the three points.
    steepness = (values[centre] - values[left]) / (centre - left)
    curvature = ((values[right] - values[centre]) / (right - centre) - steepness) / (right - left)

    def parabola(position: float) -> float:
        return values[left] + (position - left) * (steepness + curvature * (position - centre))

    # Its lowest point between the neighbours of the best position.
    low = centre if best == right else left
    high = centre if best == left else right
    lowest = best
    if curvature > 0:
        lowest = min(max((left + centre - steepness / curvature) / 2, low), high)
    gain = values[best] - parabola(lowest)
    if needs_distance and abs(lowest - best) < _LEAST_DISTANCE:
        neighbour = high if high - best >= best - low else low
        lowest = best + _STEP * (neighbour - best)
    return lowest, parabola(lowest), gain
