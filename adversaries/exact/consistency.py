"""Whether columns of a mixture and the inputs that they give go together, and what to do where they do not."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.components import differences
from adversaries.exact.layer import Layer
from adversaries.exact.mixture import Mixture
from adversaries.exact.ratios import shared_ratios
from adversaries.exact.silence import trimmed

CERTIFIED = 60.0
"""PSNR in dB that an input which is certified exact is sure to reach: its error stays below 1/1000 of the range."""
_MARGIN = 2.0
"""By this factor the estimated standard deviation of an input's error must be below what `CERTIFIED` allows."""
_AGREEMENT = 0.75
"""Least share of units about which an input that is certified and its column agree; that of a sum of two."""
_ALIKE, _SPREADS = 0.03, 6.0
"""Where ratios are shared: how far it may be below its median over all inputs, at all and in median deviations."""
_WORST = 4
"""So many of the inputs that agree least with their columns are looked at in a turn, and so many turns are taken."""
_PINNED = 0.999
"""Leverage from which on a column is no more than pinned by a unit, which other columns may be as well."""
_WITHIN = 0.9
"""Share of the zeros of a sum that are zeros of each of its parts, at least."""
_SAME = 1 - 1e-6
_TURNS, _SMALL = 20, 1e-6


def certified(mixture: Mixture, layer: Layer, columns: Tensor) -> Tensor:
    """`example`: which inputs are sure to be exact, given all columns, scaled.

    The error that rounding makes of it must stay well below what `CERTIFIED` allows, and it must lie in the range of an
    input. No column may be `odd`, and there must be one for each of the N examples: two examples whose gradients are
    proportional, as nearly equal ones may have, share a column, which gives a mean of both.
    """
    most = layer.extent * 10 ** (-CERTIFIED / 20)
    inputs = mixture.unmixed(columns)
    within = (inputs - layer.clamped(inputs)).abs().amax(1) < most
    whole = mixture.rank == layer.scene.num_examples and odd(mixture, layer, columns) is None
    return (_MARGIN * mixture.errors(columns) < most) & within & whole


def odd(mixture: Mixture, layer: Layer, columns: Tensor) -> int | None:
    """The one of all columns, scaled, that most looks like a sum of several; None if all are of one example each.

    Each column must be determined by those of its zeros that its own input leaves silent: of two examples that fire
    nearly the same units, a sum may have zeros where they cancel.

    As many columns as there are examples, none of which depends on the others, are of one example each if no two have
    an example in common. Two that do have `shared_ratios`, unless they are sums of so many that few units fire for one
    alone; but then there are few zeros, and many units that the column's own input leaves silent are none of them. Two
    of one example each may have a shared ratio as well: after one step of a network with one hidden layer, those of a
    class. Then a column is odd if it is zero only where the other one is, too, or if it agrees worse with the signs of
    its own input than the others do with theirs.
    """
    inputs, zeros = layer.clamped(mixture.unmixed(columns)), mixture.zeros(columns)
    silent = zeros.T & (layer.silence(inputs)[:, mixture.units] > 0)
    for place, units in enumerate(silent):
        if mixture.rank > 1 and not mixture.determined(units, _PINNED):
            return place
    ratios = shared_ratios(mixture, columns)
    if sums := _sums(mixture, columns, ratios):
        return sums[0][0]
    agreement = layer.agreement(inputs, zeros, mixture.units)
    least = _AGREEMENT
    if ratios.isfinite().any():
        usual = float(agreement.median())
        least = max(least, usual - max(_ALIKE, _SPREADS * float((agreement - usual).abs().median())))
    return None if agreement.min() > least else int(agreement.argmin())


def _sums(mixture: Mixture, columns: Tensor, ratios: Tensor) -> list[tuple[int, int]]:
    """Pairs of columns with a shared ratio, of which the first is zero only where the second is, too."""
    zeros = mixture.zeros(columns).double()
    within = zeros.T @ zeros / zeros.sum(0)[:, None]
    return [(one, other) for one, other in (ratios.isfinite() & (within > _WITHIN)).nonzero().tolist()]


def repaired(mixture: Mixture, layer: Layer, found: list[Tensor]) -> list[Tensor]:
    """As many columns as there are inputs, without those that are sums of several.

    Where a column is a sum of a missing one and one that is there, their ratio tells the missing one. Where it is a sum
    of a missing one and others, what is unmixed with it is nevertheless the input of the missing one, whose silence
    then leads to its column.
    """
    found = _parted(mixture, found)
    for _ in range(_WORST):
        columns = mixture.scaled(torch.stack(found, 1))
        inputs = layer.clamped(mixture.unmixed(columns))
        worst = layer.agreement(inputs, mixture.zeros(columns), mixture.units).argsort()[:_WORST]
        silence = layer.silence(inputs)[:, mixture.units]
        for place in worst.tolist():
            others, column = found[:place] + found[place + 1 :], trimmed(mixture, silence[place])
            if column is None or float((column @ found[place]).abs()) > _SAME:
                continue
            if mixture.add(others, column):
                found = others
                break
        else:
            break
    return found


def _parted(mixture: Mixture, found: list[Tensor]) -> list[Tensor]:
    """The columns, of which sums are replaced by what is left of them without their other part."""
    for _ in range(len(found)):
        columns = torch.stack(found, 1)
        ratios = shared_ratios(mixture, columns)
        for one, other in _sums(mixture, columns, ratios):
            others, left = found[:one] + found[one + 1 :], columns[:, one] - ratios[one, other] * columns[:, other]
            column = mixture.column(left / left.norm())
            if column is not None and mixture.add(others, column):
                found = others
                break
        else:
            break
    return found


def cleaned(layer: Layer, inputs: Tensor, found: int) -> Tensor:
    """`example input`: the first inputs, without what they hold of the others.

    While columns are missing, each input is known but for multiples of those whose columns they are. Those are taken
    away whose absence makes the neighbouring values of an image differ least, in the sum of absolute differences; of
    a table the values themselves.
    """
    seen = differences(inputs.reshape(-1, *layer.shape)) if len(layer.shape) == 3 else inputs
    cleaned = []
    for index in range(found):
        weights = torch.ones(seen.shape[1], dtype=seen.dtype)
        for _ in range(_TURNS):  # least absolute values by weighted least squares
            parts = torch.linalg.lstsq((seen[found:] * weights).T, (seen[index] * weights)[:, None]).solution[:, 0]
            weights = (seen[index] - parts @ seen[found:]).abs().clamp_min(_SMALL).rsqrt()
        left = 1 - parts.sum()
        cleaned.append((inputs[index] - parts @ inputs[found:]) / torch.where(left.abs() > _SMALL, left, 1))
    return torch.stack(cleaned)
