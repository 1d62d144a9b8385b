"""Whether columns of a mixture have examples in common."""

from __future__ import annotations

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
    gradients = mixture.rows @ columns
    relative = mixture.rounding(columns) / gradients.abs()
    ratios = torch.full((len(columns.T),) * 2, torch.nan, dtype=torch.float64)
    for one in range(len(ratios)):
        quotients = (gradients[:, one, None] / gradients).T.contiguous()
        error = _ERRORS * (relative[:, one, None] + relative).T.contiguous().clamp_min(_LEAST)
        telling = (error < 1) & (torch.arange(len(ratios)) != one)[:, None]
        # Signs are kept apart, and units that tell nothing lie far from all others.
        places = torch.where(quotients > 0, quotients.abs().log(), quotients.abs().log() + _APART)
        far = _APART * torch.arange(2, 2 + len(gradients), dtype=torch.float64)
        places, error = torch.where(telling, places, far), torch.where(telling, error, _LEAST)
        near, wide = _around(places, error), _around(places, _AROUND * error)
        crowded = near - _CROWD / _AROUND * wide - _FEW
        most = crowded.argmax(1, keepdim=True)
        many = (crowded > 0).any(1)
        ratios[one, many] = quotients.gather(1, most)[many, 0]
    return ratios


def _around(places: Tensor, error: Tensor) -> Tensor:
    """`row place`: how many places of its row are within the error of each."""
    order = places.sort(dim=1).values
    above = torch.searchsorted(order, places + error, right=True)
    return above - torch.searchsorted(order, places - error)
