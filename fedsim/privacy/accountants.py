"""The privacy loss of steps that add Gaussian noise to a sum over sampled examples, by Opacus' accountants."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fedsim.errors import ConfigError

Accountant = Literal["rdp", "prv"]
_LARGEST = (64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Orders of Rényi divergence beyond Opacus' own, of which a small epsilon needs the large ones."""
_FRACTIONS = (1.25, 1.5, 1.75, 2.25, 2.5, 2.75, 3.25, 3.5, 4.5, 5.5)
"""Orders by which noise is looked for, beside integers: each takes longer than all of those, and few are enough."""
_LEAST = 1e-100
"""Noise below this, or above its inverse, is taken to prove nothing: float64 loses its square, and Opacus' series may
then never end."""
_MUCH = 12.0
"""From this epsilon on, the best order is near 1, where orders have to be close to one another."""
_MOST_PRV = 100.0
"""Largest epsilon, by Rényi divergences, for which privacy loss distributions are computed: they take memory."""


class Steps(NamedTuple):
    """Steps of one kind, as Opacus' accountants list them.

    Attributes:
        noise_multiplier: standard deviation of the noise, divided by the sensitivity of the sum.
        rate: probability of each example to be in the sum, above 0 and at most 1.
        number: how many.
    """

    noise_multiplier: float
    rate: float
    number: int


@lru_cache(maxsize=1 << 16)
def epsilon_of(done: tuple[Steps, ...], delta: float, accountant: Accountant = "rdp") -> float:
    """Epsilon of all these steps together for one example added or removed; infinite where none is proved.

    Args:
        done: steps of different kinds, in any order.
        delta: above 0, below 1.
        accountant: `rdp`, or `prv`, which is tighter and takes a second or so.

    Raises:
        ConfigError: `prv` is asked for, but the noise is so small that its distributions do not fit into memory.

    References:
        Mironov, Talwar, Zhang: Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019 (rdp).
        Gopi, Lee, Wutschitz: Numerical Composition of Differential Privacy, NeurIPS 2021 (prv).
    """
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if not all(_LEAST <= steps.noise_multiplier <= 1 / _LEAST for steps in done):
        return math.inf
    total = sum(steps.number * _divergences(steps.noise_multiplier, steps.rate) for steps in done)
    with _quiet():
        rdp, _ = get_privacy_spent(orders=_orders(), rdp=total, delta=delta)
    if not math.isfinite(rdp):
        return math.inf
    return max(0.0, float(rdp)) if accountant == "rdp" else _by_distributions(done, delta, float(rdp))


@lru_cache(maxsize=4096)
def noise_multiplier_for(
    epsilon: float, delta: float, rate: float, steps: int, accountant: Accountant = "rdp"
) -> float:
    """The noise multiplier with which so many steps have at most `epsilon`, and hardly less; it takes up to seconds.

    Raises:
        ConfigError: no noise is enough.
    """
    from opacus.accountants.utils import get_noise_multiplier

    settings: dict[str, Any] = {"eps_error": _error(epsilon)}
    if accountant == "rdp":
        settings = {"alphas": [*_FRACTIONS, *range(2, 64), *_LARGEST] if epsilon < _MUCH else _orders()}
    try:
        with _quiet():
            found = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant=accountant,
                epsilon_tolerance=min(0.01, epsilon / 500),
                **settings,
            )
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"epsilon: {epsilon:g} at delta {delta:g} is not reached in {steps} steps at a sampling rate of {rate:g}, "
            f"whatever the noise ({error}); ask for a larger epsilon, or for fewer rounds and steps"
        ) from error
    while epsilon_of((Steps(found, rate, steps),), delta, accountant) > epsilon:  # distributions have errors
        found *= 1.001
    return float(found)


@lru_cache(maxsize=4096)
def _divergences(noise_multiplier: float, rate: float) -> Any:
    """Of one step, the Rényi divergence of each order."""
    from opacus.accountants.analysis.rdp import compute_rdp

    with _quiet():
        return compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=_orders())


def _by_distributions(done: tuple[Steps, ...], delta: float, rdp: float) -> float:
    """By privacy loss distributions; never more than by Rényi divergences, which is proved, too."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [tuple(steps) for steps in done]
    try:
        if rdp > _MOST_PRV:
            raise RuntimeError(f"epsilon is about {rdp:.3g}, too large for its distributions")
        with _quiet():
            return min(rdp, float(accountant.get_epsilon(delta, eps_error=_error(rdp))))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(f"accountant: 'prv' cannot compute this ({error}); set it to 'rdp'") from error


def _error(epsilon: float) -> float:
    """How finely distributions are computed that have about this epsilon, to which the error is added."""
    return min(0.01, epsilon / 300)


def _orders() -> list[float]:
    from opacus.accountants import RDPAccountant

    return [*RDPAccountant.DEFAULT_ALPHAS, *_LARGEST]


class _quiet(warnings.catch_warnings):
    """Without Opacus' advice on orders, and NumPy's on what is infinite."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
