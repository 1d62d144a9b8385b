"""Robust aggregation of several estimates, some of which may have collapsed (TGIAs-RO, Eq. 15).

Estimates are `gradient example ...`, one for each of T temporal gradients, with the examples in the
same order.
"""

from __future__ import annotations

from torch import Tensor

from fedsim.base.errors import AttackError


def mean(estimates: Tensor) -> Tensor:
    """Return the mean; a single collapsed estimate can move it anywhere."""
    return estimates.mean(0)


def median(estimates: Tensor) -> Tensor:
    """Return the coordinate-wise median; for an even number, the mean of the two in the middle.

    It stays between the estimates that have not collapsed while fewer than half have (Theorem 1).

    >>> import torch
    >>> median(torch.tensor([[1.0], [2.0], [4.0], [100.0]]))
    tensor([3.])
    """
    ranked = estimates.sort(0).values
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def trimmed_mean(estimates: Tensor, *, trim: float) -> Tensor:
    """Return the coordinate-wise mean without the smallest and largest values [Yin2018].

    Args:
        estimates: `gradient example ...`.
        trim: share that is left out at each end, in [0, 0.5); rounded down to whole estimates.
    """
    cut = int(trim * len(estimates) + 1e-9)
    return estimates.sort(0).values[cut : len(estimates) - cut].mean(0)


def krum(estimates: Tensor, *, invalid: int) -> Tensor:
    """Return the estimate that is closest to its neighbours [Blanchard2017].

    The score of an estimate is the sum of squared Euclidean distances to its T - f - 2 nearest
    neighbours; the smallest score wins.

    Args:
        estimates: `gradient example ...`.
        invalid: f, how many estimates may have collapsed; Krum needs T of at least 2 f + 3.
    """
    if len(estimates) < 2 * invalid + 3:
        raise AttackError(
            f"krum: {invalid} invalid among {len(estimates)} gradients, expected at least "
            f"{2 * invalid + 3} gradients; lower invalid, use more gradients or aggregate by median"
        )
    flat = estimates.flatten(1)
    distances = (flat[:, None] - flat[None]).square().sum(2)
    # The nearest neighbour of each estimate is itself, at distance 0.
    scores = distances.sort(1).values[:, 1 : len(estimates) - invalid - 1].sum(1)
    return estimates[scores.argmin()]
