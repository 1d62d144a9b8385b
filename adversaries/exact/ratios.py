"""Ratios that two columns of a mixture share, which tell that they have an example in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adversaries.exact.mixture import InputMixture

_ROUNDINGS = 4.0
"""Rounding errors within which two ratios are equal."""
_LEAST_ERROR = 1e-9
_LEAST_CROWD, _DENSITY_FACTOR, _NEIGHBOURHOOD = 5, 6.0, 20.0
_LOG_GAP = 1e3
"""Larger than the difference of the logarithms of any two ratios."""


def shared_ratios(mixture: InputMixture, columns: Tensor) -> Tensor:
    """Return `example example`, the ratio of two columns' gradients that many units share, or NaN.

    Columns of different examples have as many ratios as units. Two sums that have an example in
    common have the same ratio at all units that fire for it alone. Units are many if they are more
    than `_LEAST_CROWD`, and more than `_DENSITY_FACTOR` times as many as expected from a
    neighbourhood that is `_NEIGHBOURHOOD` times as wide.

    Args:
        columns: `rank example`.
    """
    gradients = (mixture.rows @ columns).T
    relative_errors = mixture.gradient_rounding(columns)[:, None] / gradients.abs()
    ratios = torch.full((len(gradients),) * 2, torch.nan, dtype=torch.float64)
    if gradients.shape[1] <= _LEAST_CROWD:  # too few units for many to share anything
        return ratios
    for first in range(len(gradients) - 1):
        quotients = gradients[first] / gradients[first + 1 :]
        errors = _ROUNDINGS * (relative_errors[first] + relative_errors[first + 1 :])
        for offset, ratio in _crowded_ratios(quotients, errors.clamp_min(_LEAST_ERROR)):
            second = first + 1 + offset
            ratios[first, second], ratios[second, first] = ratio, 1 / ratio
    return ratios


def _crowded_ratios(quotients: Tensor, errors: Tensor) -> Iterator[tuple[int, float]]:
    """Yield each row of `row unit` in which many quotients are equal, and that quotient.

    Args:
        quotients: `row unit`.
        errors: `row unit`, relative; quotients are equal within them.
    """
    # Place the quotients on a line: by logarithm, far apart by sign, and uncertain ones far away.
    certain = errors < 1
    places = quotients.abs().log() + torch.where(quotients > 0, 0, _LOG_GAP)
    far_places = _LOG_GAP * torch.arange(2, 2 + errors.shape[1], dtype=errors.dtype)
    places = torch.where(certain, places, far_places)
    errors = torch.where(certain, errors, _LEAST_ERROR)
    # Keep the rows with a crowd; most have none.
    ordered, index = places.sort(dim=1)
    reach = errors.gather(1, index).unfold(1, _LEAST_CROWD + 1, 1).amax(2)
    widths = ordered[:, _LEAST_CROWD:] - ordered[:, :-_LEAST_CROWD]
    dense = (widths <= 2 * reach).any(1).nonzero()[:, 0]
    quotients, places, errors = quotients[dense], places[dense], errors[dense]
    ordered = ordered[dense]
    # Compare each crowd with its neighbourhood.
    crowd = _count_neighbours(ordered, places, errors)
    neighbourhood = _count_neighbours(ordered, places, _NEIGHBOURHOOD * errors)
    excess = crowd - _DENSITY_FACTOR / _NEIGHBOURHOOD * neighbourhood - _LEAST_CROWD
    best_unit = excess.argmax(1)
    for row in (excess.amax(1) > 0).nonzero()[:, 0].tolist():
        yield int(dense[row]), float(quotients[row, best_unit[row]])


def _count_neighbours(ordered: Tensor, places: Tensor, errors: Tensor) -> Tensor:
    """Count for each of `row unit` the places of its row that are within its error.

    Args:
        ordered: `row unit`, the places in ascending order.
        places: `row unit`.
        errors: `row unit`.
    """
    above = torch.searchsorted(ordered, places + errors, right=True)
    return above - torch.searchsorted(ordered, places - errors)
