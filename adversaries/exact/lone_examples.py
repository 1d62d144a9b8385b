"""Examples that a unit of the first layer saw alone, found by coincidence over units and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.layer import FirstLayer

_FIT = 2.0
"""Root mean square of the standardised differences up to which two inputs are equal; 1 is expected."""
_ROUNDED_SUMS = 3
"""Float roundings that a change is counted as."""
_OUTSIDE = 5.0
"""Standard errors by which rounding may move an input out of its range."""
_MAX_ERROR = 1e-3
"""Largest standard error, as a share of the range, with which an input is read off a unit."""
_FINE_GRID, _OFF_GRID = 1e-4, 0.05
"""Largest step of a quantised sum, as a share of the largest change, up to which the smallest change is
taken for it; and shares of a larger step by which rounding may move numbers off its multiples."""
_CERTAIN_HITS = 3
"""Units and rounds that give an input alike from which on it may be certified: two sums of the same
two examples are equal by chance now and then, as there are thousands of pairs."""
_NEAR_MISS = 0.05
"""Root mean square of a difference, as a share of the range, up to which an input is a near miss."""
_MAX_MISSES = 1 / 3
"""Most near misses for each hit of a unit that certifies an input."""
_PROJECTED_AXES = 8
"""Axes on which candidates are searched for equal ones before they are compared in full."""


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """Change of the first layer in one round, as the server sees it.

    Attributes:
        rows: `unit input+1`, the changes of a unit's weights, and of its bias last.
        errors: `unit input+1`, their standard errors, which rounding makes.
    """

    layer: FirstLayer
    rows: Tensor
    errors: Tensor


@dataclass(frozen=True, kw_only=True)
class LoneExamples:
    """Inputs that units saw alone.

    Attributes:
        inputs: `example input`, in the model's range.
        errors: `example`, the standard error of a value of each.
        certified: `example`, whether so many units and rounds agree on it that it is exact.
    """

    inputs: Tensor
    errors: Tensor
    certified: Tensor

    def select_certified(self) -> LoneExamples:
        """Return those that are certified."""
        kept = self.certified
        return LoneExamples(inputs=self.inputs[kept], errors=self.errors[kept], certified=self.certified[kept])


def measure_change(layer: FirstLayer, num_clients: int) -> LayerChange:
    """Return how the layer changed, and how much of that is rounding.

    A sum of weights in float32 is off by their rounding. Where the numbers of a masked sum are
    integers, the smallest change is one step of their grid, to which each client rounds at random.

    Args:
        layer: of the round's sum.
        num_clients: whose sum it is.
    """
    rows = torch.cat([layer.weight, layer.bias[:, None]], 1)
    moved = rows[rows != 0].abs()
    step = float(moved.min())
    multiples = moved / step
    is_on_grid = bool(((multiples - multiples.round()).abs() <= _OFF_GRID).all())
    if step > _FINE_GRID * float(moved.max()) and not is_on_grid:  # few numbers, and none is small
        step = 0.0
    weight, bias = layer.endpoints[0]
    exponents = torch.frexp(torch.cat([weight, bias[:, None]], 1)).exponent
    spacings = torch.ldexp(torch.full_like(rows, torch.finfo(torch.float32).eps / 2), exponents)
    grid_variance = num_clients * step**2 / 6
    # A rounding has a variance of 1/12 of its squared step; clients' steps and their mean are several.
    errors = (_ROUNDED_SUMS * spacings.square() / 12 + grid_variance).sqrt()
    return LayerChange(layer=layer, rows=rows, errors=errors)


def find_lone_examples(changes: Sequence[LayerChange], rng: torch.Generator) -> LoneExamples:
    """Find the inputs that at least two units, or one unit in two rounds, give alike."""
    layer, quotients = changes[0].layer, _Quotients.from_changes(changes)
    candidates = quotients.list_candidates(layer)
    inputs, errors = quotients.inputs.flatten(0, 1)[candidates], quotients.errors.flatten()[candidates]
    # Group equal quotients about the most precise one that is left.
    is_free = torch.ones(len(inputs), dtype=torch.bool)
    means, mean_errors, is_certified = list[Tensor](), list[float](), list[bool]()
    certified_means = list[Tensor]()
    for index, near in enumerate(_list_neighbours(inputs, errors, rng)):
        if not is_free[index]:
            continue
        indices = torch.tensor(near)
        indices = indices[is_free[indices]]
        standard_errors = (errors[index].square() + errors[indices].square()).sqrt()
        deviations = (inputs[indices] - inputs[index]).square().mean(1).sqrt()
        group = indices[deviations <= _FIT * standard_errors]
        if len(group) < 2:
            continue
        is_free[group] = False
        precisions = errors[group] ** -2
        mean, error = precisions @ inputs[group] / precisions.sum(), float(precisions.sum() ** -0.5)
        if _is_near(mean, certified_means, _NEAR_MISS * layer.range_width):
            continue  # the same example, with a little of another one
        means.append(mean)
        mean_errors.append(error)
        units = sorted(set((candidates[group] % quotients.errors.shape[1]).tolist()))
        is_certified.append(quotients.are_certain(mean, error, units, layer.range_width))
        if is_certified[-1]:
            certified_means.append(mean)
    if not means:
        empty = inputs.new_empty(0)
        return LoneExamples(inputs=inputs[:0], errors=empty, certified=empty.bool())
    return LoneExamples(
        inputs=layer.clamp_inputs(torch.stack(means)),
        errors=torch.tensor(mean_errors, dtype=inputs.dtype),
        certified=torch.tensor(is_certified),
    )


@dataclass(frozen=True, kw_only=True)
class _Quotients:
    """Rows over biases.

    Attributes:
        inputs: `round unit input`; NaN where the bias did not move.
        errors: `round unit`, the standard error of a value.
    """

    inputs: Tensor
    errors: Tensor

    @classmethod
    def from_changes(cls, changes: Sequence[LayerChange]) -> _Quotients:
        rows = torch.stack([change.rows for change in changes])
        row_errors = torch.stack([change.errors for change in changes])
        biases = torch.where(rows[:, :, -1:] == 0, torch.nan, rows[:, :, -1:])
        inputs = rows[:, :, :-1] / biases
        # Both the weights and the bias are rounded.
        variances = (row_errors[:, :, :-1].square() + (inputs * row_errors[:, :, -1:]).square()) / biases.square()
        return cls(inputs=inputs, errors=variances.mean(2).sqrt())

    def list_candidates(self, layer: FirstLayer) -> Tensor:
        """Return the flat indices of inputs that are precise and in range, the most precise ones first."""
        errors = self.errors.flatten()
        precise = (errors <= _MAX_ERROR * layer.range_width).nonzero()[:, 0]
        inputs = self.inputs.flatten(0, 1)[precise]
        excess = (inputs - layer.clamp_inputs(inputs)).abs().amax(1)
        candidates = precise[excess <= _OUTSIDE * errors[precise]]
        return candidates[errors[candidates].argsort(stable=True)]

    def are_certain(self, mean: Tensor, error: float, units: list[int], range_width: float) -> bool:
        """Return whether enough rounds give an input, of units that seldom nearly give it.

        Where two examples fire a unit in all rounds, the shares of the two change slowly, so that
        some rounds give equal sums, and others are near misses.

        Args:
            mean: `input`, on which they agree.
            error: its standard error.
            units: which do.
        """
        deviations = (self.inputs[:, units] - mean).square().mean(2).sqrt()
        errors = self.errors[:, units]
        agree = deviations <= _FIT * (errors.square() + error**2).sqrt()
        # An imprecise input agrees with many.
        hits = agree & (errors <= _MAX_ERROR * range_width)
        num_hits = hits.sum(0)
        num_misses = (~agree & (deviations <= _NEAR_MISS * range_width)).sum(0)
        hits = hits[:, num_misses <= _MAX_MISSES * num_hits]
        # Two examples whose shares are the same in all units of a round, or in all rounds of a unit, agree as well.
        num_rounds, num_units = int(hits.any(1).sum()), int(hits.any(0).sum())
        is_varied = num_rounds >= 2 and (num_units >= 2 or not num_misses.any())
        return is_varied and int(hits.sum()) >= _CERTAIN_HITS


def _is_near(value: Tensor, others: Sequence[Tensor], distance: float) -> bool:
    """Return whether the root mean square of a difference to one of the others is at most that."""
    if not others:
        return False
    return bool(((torch.stack(list(others)) - value).square().mean(1).sqrt() <= distance).any())


def _list_neighbours(inputs: Tensor, errors: Tensor, rng: torch.Generator) -> list[list[int]]:
    """Return for each input the indices of those that may equal it, itself among them."""
    from scipy.spatial import KDTree

    if not len(inputs):
        return []
    axes = min(_PROJECTED_AXES, inputs.shape[1])
    directions = torch.randn(inputs.shape[1], axes, generator=rng, dtype=inputs.dtype)
    projected = (inputs @ torch.linalg.qr(directions).Q).numpy()
    reach = _FIT * (errors.square() + errors.max() ** 2).sqrt() * inputs.shape[1] ** 0.5
    neighbours = KDTree(projected).query_ball_point(projected, reach.numpy(), return_sorted=True)
    return [list(near) for near in neighbours]
