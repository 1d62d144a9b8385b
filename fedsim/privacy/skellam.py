"""What sums of integers under Skellam noise prove, by Rényi divergences.

A Skellam number is the difference of two Poisson numbers. Sums of them are Skellam numbers, too, so
the noise of a sum is known however many clients drew a share of it, which for discrete Gaussian
noise holds only about. The bound grows with the step of the grid; in fine steps it is that of
Gaussian noise. dp-accounting turns divergences into epsilon and delta.

References:
    [Agarwal2021], Corollary 3.6: with variance mu, at an integer order alpha above 1, the
    divergence is at most alpha D_2^2 / (2 mu) + min(((2 alpha - 1) D_2^2 + 6 D_1) / (4 mu^2), 3 D_1
    / (2 mu)), where D_1 and D_2 are the largest L1 and L2 distances of two neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.interfaces.mechanism import Mechanism

_ORDERS = (*range(2, 64), *range(64, 129, 8), 160, 192, 256, 384, 512, 768, 1024)
"""Integer orders at which divergences are computed."""


def bound_divergences(variance: float, distance: float, dimension: int) -> NDArray[np.float64]:
    """Return the largest Rényi divergence of one release at each order.

    Args:
        variance: mu of the noise of each number, in steps of the grid.
        distance: D_2, likewise.
        dimension: how many numbers are released.
    """
    orders = np.array(_ORDERS, dtype=float)
    # Of integers, the L1 norm is at most the square of the L2 norm.
    l1_distance = distance * min(math.sqrt(dimension), distance)
    fine = ((2 * orders - 1) * distance**2 + 6 * l1_distance) / (4 * variance**2)
    coarse = 3 * l1_distance / (2 * variance)
    return orders * distance**2 / (2 * variance) + np.minimum(fine, coarse)


def compute_skellam_epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """Return the epsilon of Skellam mechanisms together as they are stated.

    >>> mechanism = Mechanism(noise="skellam", scale=4.0, distance=1000.0, dimension=50)
    >>> round(compute_skellam_epsilon([mechanism], delta=1e-5), 2)
    1.01
    """
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    epsilon, _ = compute_epsilon(_ORDERS, _sum_divergences(mechanisms, replaced=False), delta)
    return max(0.0, float(epsilon))


def compute_skellam_deltas(
    mechanisms: Iterable[Mechanism], epsilons: Sequence[float], *, replaced: bool
) -> list[float]:
    """Return the delta of all releases together at each epsilon; see `compute_trade_off`."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    divergences = _sum_divergences(mechanisms, replaced=replaced)
    return [min(1.0, float(compute_delta(_ORDERS, divergences, epsilon)[0])) for epsilon in epsilons]


def _sum_divergences(mechanisms: Iterable[Mechanism], *, replaced: bool) -> NDArray[np.float64]:
    """Add the divergences of releases of different kinds."""
    total = np.zeros(len(_ORDERS))
    for mechanism in mechanisms:
        assert mechanism.distance is not None
        assert mechanism.dimension is not None
        variance = (mechanism.scale * mechanism.distance) ** 2
        # One client in place of another is one less and one more.
        distance = mechanism.distance * (2 if replaced and mechanism.neighbours == "added or removed" else 1)
        total += mechanism.releases * bound_divergences(variance, distance, mechanism.dimension)
    return total
