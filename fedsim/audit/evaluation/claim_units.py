"""Doubt claims that are in another unit than the true examples, or have their channels in another order.

A claim in standardised units that is clamped to [0, 1], or one of BGR images, scores as badly as one of noise, though
who knows the unit sees the victim's data in it.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.base import metrics
from fedsim.base.errors import format_percent

_EXPLAINED = 0.6
"""Share of the true values' variance that a linear map of the claims explains at least; of noise it is less."""
_NEARER = 0.5
"""Share of the squared error that such a map leaves at most."""
_LEAST_ERROR = 1e-3
"""Mean squared error, 30 dB, from which on the order of channels is doubted."""
_REVERSED = -0.5
"""Correlation of the differences of the outer channels up to which they seem reversed."""
_FEWEST_VALUES = 64
"""Fewest values to which two numbers are fitted."""
_MOST_PAIRS = 2_000_000
"""Most pairs of claims and true examples: to assign more takes seconds."""
_ONE_END, _NATURAL = 0.9, 0.5
"""Shares of the claimed and of the true values at one end of [0, 1], from which on claims seem to be clamped, and from
which on the data are so themselves."""


def doubt_units(claimed: Tensor, true: Tensor, where: str) -> None:
    """Raise a doubt where claims find nothing and a map of them is near to the truth, or where they all are clamped.

    Claims that are nearer to the truth than any constant say enough as they are, as those of too low a contrast.

    Args:
        claimed: `claim ...`, numbers in [0, 1].
        true: `example ...`, what the victim held, likewise.
    """
    for end in (0.0, 1.0):
        shares = [float((values == end).double().mean()) for values in (claimed, true)]
        if shares[0] >= _ONE_END and shares[1] < _NATURAL:
            raise_doubt(
                "%s: %s of the claimed values are %g, and %s of the true ones; they seem to be clamped in "
                "another unit; unless the attack failed, claim (inputs - low) / (high - low) by value_range",
                *(where, format_percent(shares[0], ".0f"), end, format_percent(shares[1], ".0f")),
            )
            return
    if len(claimed) * len(true) > _MOST_PAIRS:
        return
    first, second = _pair_by_error(claimed, true)
    error = _mean_square(first - second)
    if _are_reversed(claimed, true, error):
        raise_doubt(
            "%s: with their channels in reverse order, as of BGR and RGB, the claims are nearer to the true images "
            "than as they are; see that the truth, input_shape and the model have them in one order",
            where,
        )
        return
    if error < _mean_square(true.double() - true.double().mean()):  # they are nearer than any constant
        return
    first, second = _pair_by_correlation(claimed, true)
    if first.numel() < _FEWEST_VALUES or _correlate(first, second) ** 2 < _EXPLAINED:
        return
    factor = _correlate(first, second) * float(second.std() / first.std())
    offset = float(second.mean()) - factor * float(first.mean())
    if _mean_square(factor * first + offset - second) <= _NEARER * error:
        raise_doubt(
            "%s: multiplied by %.2g and shifted by %.2g, the claimed values are much nearer to the true ones than as "
            "they are, so they seem to be in another unit; claim (inputs - low) / (high - low) by value_range",
            *(where, factor, offset),
        )


def _are_reversed(claimed: Tensor, true: Tensor, error: float) -> bool:
    """Return whether images are nearer to the true ones, and to their colours, with their channels in reverse order.

    A tint that an attack adds to all pixels is nearer to some images when it is reversed, but says nothing of theirs.
    """
    if claimed.ndim != 4 or claimed.shape[1] != 3 or error < _LEAST_ERROR:
        return False
    first, second = _pair_by_error(claimed.flip(1), true)
    if _mean_square(first - second) > _NEARER * error:
        return False
    differences = [images[:, 2] - images[:, 0] for images in (first.flip(1), second)]
    return _correlate(*(values - values.mean((1, 2), keepdim=True) for values in differences)) <= _REVERSED


def _correlate(first: Tensor, second: Tensor) -> float:
    """Return the correlation of all values; 0 where some do not vary."""
    first, second = first - first.mean(), second - second.mean()
    spreads = math.sqrt(_mean_square(first) * _mean_square(second))
    return float((first * second).mean()) / spreads if spreads else 0.0


def _pair_by_error(claimed: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return claims and true examples one to one, paired as they are scored."""
    return _pair(claimed, true, metrics.image_misfits(claimed, true))


def _pair_by_correlation(claimed: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return claims and true examples one to one, whatever the unit of the claims."""
    return _pair(claimed, true, 1 - metrics.correlations(claimed, true).T.abs())


def _pair(claimed: Tensor, true: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
    highest = costs.max().expand(len(true), 1)  # so that as many are paired as there are
    assignment = metrics.assign_by_costs(costs, lambda: highest)
    has_claim = assignment >= 0
    return claimed[assignment[has_claim]].double(), true[has_claim].double()


def _mean_square(values: Tensor) -> float:
    return float(values.square().mean())
