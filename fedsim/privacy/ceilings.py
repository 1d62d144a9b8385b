"""What an adversary could at most have reached, from the trade-off curve of a mechanism.

Between the messages of two neighbours no test finds more than a share TPR of the ones where it
takes a share FPR of the others for them, and that curve follows from the mechanism alone. It bounds

- membership inference: TPR at each FPR, hence AUC and balanced accuracy;
- reconstruction (ReRo): who would pick the true record with probability kappa before seeing any
  message picks it with probability at most TPR(kappa) after.

N is sent in clear, and an experiment's clients hold as many examples whoever is a member, so the
curve is that of one example replaced by another, which is larger than that of one added or removed.

References:
    [Dong2022] (trade-off functions); [Balle2022] and [Hayes2023], Sec. 3 (ReRo by them). The
    privacy loss distribution is that of dp-accounting, rounded so that it never promises too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.skellam import compute_skellam_deltas, compute_skellam_epsilon

Numbers = NDArray[np.float64]
_EPSILONS = np.concatenate([np.linspace(0.0, 4.0, 81), np.linspace(4.25, 20.0, 64)])
"""Where the privacy profile is evaluated; a curve through fewer points is higher, so it holds."""
_MAX_EPSILON = 60.0
"""An epsilon of one release above which no curve is computed: it would be 1 to 20 digits."""
_MAX_RELEASES = 1_000_000
_INTERVAL = 1e-3
"""Width at which privacy losses are rounded up."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TradeOff:
    """The largest true-positive rate of any test at each false-positive rate.

    Attributes:
        epsilons: `point`.
        deltas: `point`, such that the mechanism is (epsilon, delta)-differentially private.
    """

    epsilons: Numbers
    deltas: Numbers

    def true_positive_rate(self, false_positive_rate: ArrayLike) -> Numbers:
        """Return the largest true-positive rate, also that of a guess that is right so often.

        >>> none = TradeOff(epsilons=np.array([0.0]), deltas=np.array([0.1]))
        >>> float(none.true_positive_rate(0.25))
        0.35
        """
        false_rates = np.asarray(false_positive_rate, dtype=float)[..., None]
        from_left = self.deltas + np.exp(self.epsilons) * false_rates
        from_right = 1 - np.exp(-self.epsilons) * (1 - self.deltas - false_rates)
        highest: Numbers = np.minimum(from_left, from_right).min(-1)
        return np.clip(highest, 0.0, 1.0)

    def false_positive_rate(self, true_positive_rate: float) -> float:
        """Return the least false-positive rate at which a test can reach that true-positive rate.

        >>> none = TradeOff(epsilons=np.array([0.0]), deltas=np.array([0.1]))
        >>> round(none.false_positive_rate(0.35), 12)
        0.25
        """
        from_left = np.exp(-self.epsilons) * (true_positive_rate - self.deltas)
        from_right = 1 - self.deltas - np.exp(self.epsilons) * (1 - true_positive_rate)
        return max(0.0, float(np.maximum(from_left, from_right).max()))

    @property
    def accuracy(self) -> float:
        """Return the largest balanced accuracy, from the total variation distance."""
        return 0.5 + float(self.deltas[self.epsilons == 0].min(initial=1.0)) / 2

    @cached_property
    def area(self) -> float:
        """Return the largest area under a ROC curve, rounded up by at most 1 in 4000."""
        return float(self.true_positive_rate(np.linspace(0, 1, 4001)[1:]).mean())


def compute_trade_off(mechanisms: Iterable[Mechanism], *, replaced: bool = True) -> TradeOff | None:
    """Compute the curve of all these releases together.

    Args:
        mechanisms: at least one, in any order.
        replaced: for one record replaced, also where the mechanism is stated for one added or
            removed; otherwise as it is stated.

    Returns:
        The curve; None where there is so little noise that nothing below 1 is proved.

    >>> curve = compute_trade_off([Mechanism(scale=2.0, neighbours="replaced")])
    >>> round(curve.accuracy, 3), round(float(curve.true_positive_rate(0.01)), 3)
    (0.599, 0.034)
    """
    return _compute_trade_off(_count_releases(mechanisms), replaced)


def _count_releases(mechanisms: Iterable[Mechanism]) -> tuple[Mechanism, ...]:
    """Return each kind of mechanism once, with all its releases, in an order of its own."""
    releases: dict[Mechanism, int] = {}
    for mechanism in mechanisms:
        kind = replace(mechanism, releases=1)
        releases[kind] = releases.get(kind, 0) + mechanism.releases
    return tuple(sorted(replace(kind, releases=number) for kind, number in releases.items()))


@lru_cache(maxsize=4096)
def _compute_trade_off(kinds: tuple[Mechanism, ...], replaced: bool) -> TradeOff | None:
    """Compose the privacy loss distributions of different kinds of releases."""
    if any(_is_hopeless(kind) for kind in kinds):
        return None
    num_skellam = sum(kind.noise == "skellam" for kind in kinds)
    if num_skellam == len(kinds):
        deltas = compute_skellam_deltas(kinds, _EPSILONS.tolist(), replaced=replaced)
    elif num_skellam:
        return None  # divergences and distributions are not composed with one another
    else:
        deltas = _compose(kinds, replaced).get_delta_for_epsilon(_EPSILONS.tolist())
    return TradeOff(epsilons=_EPSILONS, deltas=np.array(deltas, dtype=float))


def compute_tight_epsilon(mechanism: Mechanism, delta: float) -> float:
    """Compute the epsilon of a mechanism as it is stated; no sound accountant proves less.

    >>> round(compute_tight_epsilon(Mechanism(scale=1.0), delta=1e-5), 2)
    4.38
    """
    return compute_composed_epsilon([mechanism], delta)


def compute_composed_epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """Compute the epsilon of all these releases together, as they are stated.

    It is infinite where some have Skellam noise and others not: divergences and distributions are not composed.

    >>> compute_composed_epsilon([Mechanism(noise="laplace", scale=4.0, releases=2)], delta=0.0)
    0.5
    """
    kinds = _count_releases(mechanisms)
    if any(_is_hopeless(kind) for kind in kinds):
        return math.inf
    num_skellam = sum(kind.noise == "skellam" for kind in kinds)
    if num_skellam:
        return compute_skellam_epsilon(kinds, delta) if num_skellam == len(kinds) else math.inf
    if delta == 0:  # a distribution that is cut off at its ends promises nothing there
        return sum(kind.releases / kind.scale if kind.noise == "laplace" else math.inf for kind in kinds)
    return float(_compose(kinds, replaced=False).get_epsilon_for_delta(delta))


def _compose(kinds: tuple[Mechanism, ...], replaced: bool) -> Any:
    """Return the privacy loss distribution of releases of different kinds together."""
    from dp_accounting.pld.privacy_loss_distribution import identity

    total = identity(value_discretization_interval=_INTERVAL)
    for kind in kinds:
        total = total.compose(_make_distribution(kind, replaced))
    return total


def _is_hopeless(kind: Mechanism) -> bool:
    """Return whether one sum, or all sums together, reveal everything to the last digit."""
    loss = 1 / kind.scale + 1 / (2 * kind.scale**2)
    return loss > _MAX_EPSILON or kind.rate**2 * kind.releases * loss > _MAX_EPSILON or kind.releases > _MAX_RELEASES


def _make_distribution(kind: Mechanism, replaced: bool) -> Any:
    """Return the privacy loss distribution of all releases of one kind."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    # Where the scale refers to a replacement, the two sums are one unit apart, as if one was added.
    widens = replaced and kind.neighbours == "added or removed"
    common = {"value_discretization_interval": _INTERVAL}
    if kind.noise == "laplace":
        scale = kind.scale / 2 if widens else kind.scale
        return pld.from_laplace_mechanism(scale, **common).self_compose(kind.releases)
    relation = NeighboringRelation.REPLACE_ONE if widens else NeighboringRelation.ADD_OR_REMOVE_ONE
    if kind.rate == 1:
        deviation = kind.scale / math.sqrt(kind.releases)
        return pld.from_gaussian_mechanism(deviation, neighboring_relation=relation, **common)
    single = pld.from_gaussian_mechanism(kind.scale, sampling_prob=kind.rate, neighboring_relation=relation, **common)
    return single.self_compose(kind.releases)
