"""Privacy loss of steps that add Gaussian noise to a sum over sampled examples, by Opacus.

Each kind of step has a Rényi divergence at each order. Divergences add up over steps, and the order
that gives the smallest epsilon counts. Privacy loss distributions (PRV) are tighter, and slower.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedsim.base.errors import ConfigError

Accountant = Literal["rdp", "prv"]
_OPACUS_ORDERS = (*(1 + tenths / 10.0 for tenths in range(1, 100)), *range(12, 64))
"""Orders of Rényi divergence of Opacus' `RDPAccountant`."""
_LARGEST_NOISE = 1e6
"""Noise above which Opacus' `get_noise_multiplier` gives up."""
_LARGE_ORDERS = (64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Orders of Rényi divergence beyond Opacus' own; a small epsilon needs them."""
_FRACTIONAL_ORDERS = (1.25, 1.5, 1.75, 2.25, 2.5, 2.75, 3.25, 3.5, 4.5, 5.5)
"""Orders for the search for noise, besides integers."""
_FIRST_ORDER = 16
"""Order at which the search for noise begins."""
_SMALLEST_NOISE = 1e-100
"""Noise below this, or above its inverse, proves nothing: its square leaves the range of float64,
and Opacus' series may then never end."""
_FINE_ORDERS_FROM_EPSILON = 12.0
"""From this epsilon on, the best order is near 1, where orders have to be close to one another."""
_MAX_PRV_EPSILON = 100.0
"""Largest epsilon, by Rényi divergences, for which privacy loss distributions fit into memory."""


class Steps(NamedTuple):
    """Steps of one kind, in the order of fields that Opacus' accountants use.

    Attributes:
        noise_multiplier: standard deviation of the noise, divided by the sensitivity of the sum.
        rate: probability of each example to be in the sum, above 0 and at most 1.
        number: how many.
    """

    noise_multiplier: float
    rate: float
    number: int


@lru_cache(maxsize=1 << 16)
def compute_epsilon(steps: tuple[Steps, ...], delta: float, accountant: Accountant = "rdp") -> float:
    """Compute the epsilon of all steps together, for one example added or removed.

    Args:
        steps: steps of different kinds, in any order.
        delta: above 0, below 1.
        accountant: `rdp`, or `prv`, which is tighter and takes a second or so.

    Returns:
        Epsilon, infinite where nothing is proved.

    Raises:
        ConfigError: `prv` is asked for, but the noise is so small that its distributions do not fit
            into memory.

    References:
        [Mironov2019] for `rdp`; [Gopi2021] for `prv`.

    >>> steps = Steps(noise_multiplier=1.0, rate=0.01, number=1000)
    >>> round(compute_epsilon((steps,), delta=1e-5), 2)
    2.1
    """
    if not all(_SMALLEST_NOISE <= kind.noise_multiplier <= 1 / _SMALLEST_NOISE for kind in steps):
        return math.inf
    divergences = sum(kind.number * _renyi_divergences(kind.noise_multiplier, kind.rate) for kind in steps)
    with _SuppressWarnings():
        rdp_epsilon, _ = _load_analysis().get_privacy_spent(orders=_renyi_orders(), rdp=divergences, delta=delta)
    if not math.isfinite(rdp_epsilon):
        return math.inf
    if accountant == "rdp":
        return max(0.0, float(rdp_epsilon))
    return _compute_prv_epsilon(steps, delta, float(rdp_epsilon))


@lru_cache(maxsize=4096)
def find_noise_multiplier(
    epsilon: float, delta: float, rate: float, steps: int, accountant: Accountant = "rdp"
) -> float:
    """Find the smallest noise multiplier with which so many steps have at most `epsilon`.

    The search takes up to seconds.

    Args:
        epsilon: the epsilon of all steps together, above 0.
        delta: above 0, below 1.
        rate: probability of each example to be in a step's sum, above 0 and at most 1.
        accountant: `rdp` or `prv`, as in `compute_epsilon`.

    Raises:
        ConfigError: no noise is enough.
    """
    tolerance = min(0.01, epsilon / 500)
    try:
        with _SuppressWarnings():
            if accountant == "rdp":
                noise_multiplier = _search_noise(epsilon, delta, rate, steps, tolerance)
            else:
                from opacus.accountants.utils import get_noise_multiplier

                noise_multiplier = get_noise_multiplier(
                    target_epsilon=epsilon,
                    target_delta=delta,
                    sample_rate=rate,
                    steps=steps,
                    accountant=accountant,
                    epsilon_tolerance=tolerance,
                    eps_error=_prv_error(epsilon),
                )
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"epsilon: {epsilon:g} at delta {delta:g} is not reached in {steps} steps at a sampling rate of {rate:g}, "
            f"whatever the noise ({error}); ask for a larger epsilon, or for fewer rounds and steps"
        ) from error
    # The search has a tolerance, and distributions have errors: raise the noise until it is enough.
    while compute_epsilon((Steps(noise_multiplier, rate, steps),), delta, accountant) > epsilon:
        noise_multiplier *= 1.001
    return float(noise_multiplier)


def _search_noise(epsilon: float, delta: float, rate: float, steps: int, tolerance: float) -> float:
    """Search the noise as Opacus' `get_noise_multiplier` does, with few of its orders at each step.

    Epsilon falls to the best order and rises after it, and the best order changes little from one step
    to the next. So each step walks from the last one's best order to its own.
    """
    fine = epsilon >= _FINE_ORDERS_FROM_EPSILON
    orders = sorted(_renyi_orders() if fine else [*_FRACTIONAL_ORDERS, *range(2, 64), *_LARGE_ORDERS])
    best = orders.index(_FIRST_ORDER)
    too_little, enough, reached = 0.0, 10.0, math.inf
    while reached > epsilon:
        enough *= 2
        reached, best = _walk_to_best_order(orders, best, Steps(enough, rate, steps), delta)
        if enough > _LARGEST_NOISE:
            raise ValueError("The privacy budget is too low.")
    while epsilon - reached > tolerance:
        middle = (too_little + enough) / 2
        middle_epsilon, best = _walk_to_best_order(orders, best, Steps(middle, rate, steps), delta)
        if middle_epsilon < epsilon:
            enough, reached = middle, middle_epsilon
        else:
            too_little = middle
    return enough


def _walk_to_best_order(orders: Sequence[float], start: int, steps: Steps, delta: float) -> tuple[float, int]:
    """Return the least epsilon of orders beside one another, beginning at index `start`, and its index."""
    analysis = _load_analysis()

    def compute(index: int) -> float:
        if not 0 <= index < len(orders):
            return math.inf
        order = float(orders[index])
        divergence = analysis.compute_rdp(
            q=steps.rate, noise_multiplier=steps.noise_multiplier, steps=steps.number, orders=order
        )
        epsilon, _ = analysis.get_privacy_spent(orders=order, rdp=divergence, delta=delta)
        return float(epsilon) if math.isfinite(epsilon) else math.inf

    best, least = start, compute(start)
    # At a large order the divergence may leave the range of float64; smaller ones are finite.
    while least == math.inf and best > 0:
        best -= 1
        least = compute(best)
    for direction in (-1, 1):
        while (following := compute(best + direction)) < least:
            best, least = best + direction, following
    return least, best


@lru_cache(maxsize=4096)
def _renyi_divergences(noise_multiplier: float, rate: float) -> Any:
    """Return the Rényi divergence of one step at each order."""
    with _SuppressWarnings():
        return _load_analysis().compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=_renyi_orders())


def _compute_prv_epsilon(steps: tuple[Steps, ...], delta: float, rdp_epsilon: float) -> float:
    """Return epsilon by privacy loss distributions, at most `rdp_epsilon`, which is proved too."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [tuple(kind) for kind in steps]
    try:
        if rdp_epsilon > _MAX_PRV_EPSILON:
            raise RuntimeError(f"epsilon is about {rdp_epsilon:.3g}, too large for its distributions")
        with _SuppressWarnings():
            return min(rdp_epsilon, float(accountant.get_epsilon(delta, eps_error=_prv_error(rdp_epsilon))))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(f"accountant: 'prv' cannot compute this ({error}); set it to 'rdp'") from error


def _prv_error(epsilon: float) -> float:
    """Return the error, added to epsilon, at which distributions are discretised."""
    return min(0.01, epsilon / 300)


def _renyi_orders() -> list[float]:
    return [*_OPACUS_ORDERS, *_LARGE_ORDERS]


@cache
def _load_analysis() -> Any:
    """Load Opacus' functions of Rényi divergences, one file, without its package.

    The package imports its engine, and with it parts of torch that take longer to import than all else together.
    """
    package = find_spec("opacus")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py"
    spec = spec_from_file_location("opacus_analysis_rdp", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _SuppressWarnings(warnings.catch_warnings):
    """Context without Opacus' advice on orders, and NumPy's warnings on infinite values."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
