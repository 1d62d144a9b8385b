"""Whether columns of a mixture and the inputs that they give go together, and what to do where they do not."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.components import differences
from adversaries.exact.layer import Layer
from adversaries.exact.mixture import Mixture
from adversaries.exact.silence import trimmed

CERTIFIED = 60.0
"""PSNR in dB that an input which is certified exact is sure to reach: its error stays below 1/1000 of the range."""
_AGREEMENT = 0.7
"""Least share of units about which an input that is certified and its column agree; see also `_ALIKE`, `_SPREADS`."""
_ALIKE, _SPREADS = 0.03, 6.0
"""How far that share may be below its median over all inputs, at all and in median deviations from it."""
_WORST = 4
"""So many of the inputs that agree least with their columns are looked at in a turn, and so many turns are taken."""
_SAME = 1 - 1e-6
_TURNS, _SMALL = 20, 1e-6


def certified(mixture: Mixture, layer: Layer, columns: Tensor) -> Tensor:
    """`example`: which inputs are sure to be exact, given all columns, scaled.

    The error that rounding makes of it must stay below what `CERTIFIED` allows. And the columns must be `odd` nowhere.
    """
    most = layer.extent * 10 ** (-CERTIFIED / 20)
    return (mixture.errors(columns) < most) & (odd(mixture, layer, columns) is None)


def odd(mixture: Mixture, layer: Layer, columns: Tensor) -> int | None:
    """The one of all columns, scaled, that goes worst with its own input; None where all go equally well with theirs.

    The zeros of a column are those units that its input does not fire, by the sign of what the layer makes of it. A
    column that is a sum of several gives an input that disagrees, and spoils others.
    """
    inputs = layer.clamped(mixture.unmixed(columns))
    agreement = layer.agreement(inputs, mixture.zeros(columns), mixture.units)
    usual = float(agreement.median())
    spread = max(_ALIKE, _SPREADS * float((agreement - usual).abs().median()))
    return None if agreement.min() > max(_AGREEMENT, usual - spread) else int(agreement.argmin())


def repaired(mixture: Mixture, layer: Layer, found: list[Tensor]) -> list[Tensor]:
    """As many columns as there are inputs, without those that are sums of several.

    Where a column is a sum of a missing one and others, what is unmixed with it is nevertheless the input of the
    missing one, whose silence then leads to its column.
    """
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
