"""Whether columns of a mixture have examples in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adversaries.exact.mixture import Mixture

_ERRORS = 4.0
"""Rounding errors within which two ratios are the same."""
_LEAST = 1e-9
_FEW, _CROWD, _AROUND = 5, 6.0, 20.0
_APART = 1e3
"""More than the logarithms of any two ratios differ by."""


def shared_ratios(mixture: Mixture, columns: Tensor) -> Tensor:
    """`example example`: the one ratio that the gradients of two columns have at many units, NaN where there is none.

    Columns of different examples have as many ratios as units. Two sums that have an example in common have one at all
    units that fire for it alone. Many are more than a few, and more than `_CROWD` times as many as its neighbourhood,
    `_AROUND` times as wide, lets expect.

    Args:
        columns: `rank example`.
    """
    gradients = (mixture.rows @ columns).T
    relative = mixture.rounding(columns)[:, None] / gradients.abs()
    ratios = torch.full((len(gradients),) * 2, torch.nan, dtype=torch.float64)
    if gradients.shape[1] <= _FEW:  # too few units for many to share anything
        return ratios
    for one in range(len(gradients) - 1):
        quotients, error = gradients[one] / gradients[one + 1 :], _ERRORS * (relative[one] + relative[one + 1 :])
        for other, ratio in _crowds(quotients, error.clamp_min(_LEAST)):
            ratios[one, one + 1 + other], ratios[one + 1 + other, one] = ratio, 1 / ratio
    return ratios


def _crowds(quotients: Tensor, error: Tensor) -> Iterator[tuple[int, float]]:
    """Each row of `row unit` in which many quotients are one within their relative errors, and that quotient."""
    telling = error < 1
    # Signs are kept apart, and units that tell nothing lie far from all others.
    places = quotients.abs().log() + torch.where(quotients > 0, 0, _APART)
    places = torch.where(telling, places, _APART * torch.arange(2, 2 + error.shape[1], dtype=error.dtype))
    error = torch.where(telling, error, _LEAST)
    order, index = places.sort(dim=1)
    reach = error.gather(1, index).unfold(1, _FEW + 1, 1).amax(2)
    dense = (order[:, _FEW:] - order[:, :-_FEW] <= 2 * reach).any(1).nonzero()[:, 0]  # most rows are not
    quotients, places, error, order = quotients[dense], places[dense], error[dense], order[dense]
    crowd = _around(order, places, error) - _CROWD / _AROUND * _around(order, places, _AROUND * error) - _FEW
    most = crowd.argmax(1)
    for row in (crowd.amax(1) > 0).nonzero()[:, 0].tolist():
        yield int(dense[row]), float(quotients[row, most[row]])


def _around(order: Tensor, places: Tensor, error: Tensor) -> Tensor:
    """`row unit`: how many places of its row, which `order` has in order, are within the error of each."""
    above = torch.searchsorted(order, places + error, right=True)
    return above - torch.searchsorted(order, places - error)
