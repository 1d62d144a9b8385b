"""A lower bound of epsilon from guesses about canaries, as an audit in one training run gives it.

Each of m canaries is in the data or not, by a fair coin of its own. An adversary who sees what the
mechanism published guesses some of the coins. Nobody can guess too many of them right if the
mechanism keeps its promise, so many correct guesses refute every epsilon below some value.

References:
    [Steinke2023], the main theorem for (epsilon, delta)-differential privacy with abstentions, and
    App. D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from torch import Tensor

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.curve_audit import curve_lower_bound

GUESS_SHARES = (1.0, 0.5, 0.2, 0.05)
"""Shares of the canaries that are guessed; each is tried, and the best bound counts."""
CURVE_SHARE = 0.2
"""Share of the canaries that is guessed for the bound by a declared curve.

It is fixed, because each further trial costs confidence. For Gaussian noise of 0.5 to 2 clipping
bounds and 2,000 to 10,000 canaries it shows at least as much as shares of 0.5 and 0.05."""
CURVE_ERROR = 0.5
"""Part of the error probability that the bound by a declared curve may use."""
_MAX_EPSILON = 50.0
"""Above this epsilon, the chance to guess right, e^epsilon / (1 + e^epsilon), is 1 in float64."""


@dataclass(frozen=True, kw_only=True)
class EpsilonBound:
    """Lower bound of a mechanism's epsilon, and the guesses that prove it.

    Attributes:
        epsilon: lower bound; smaller ones are refuted at the confidence that was asked for.
        canaries: m, the number of canaries.
        guesses: how many canaries the adversary guessed; it abstained on the others.
        correct: how many guesses were correct.
        uses_curve: whether the bound is that of a mechanism of the declared kind, see
            `fedsim.privacy.curve_audit`; otherwise it is that of any mechanism.
    """

    epsilon: float
    canaries: int
    guesses: int
    correct: int
    uses_curve: bool = False

    @property
    def evidence(self) -> str:
        """Return how many guesses are right, and whether the bound holds for noise of the declared kind alone.

        >>> EpsilonBound(epsilon=2.4, canaries=2000, guesses=400, correct=345, uses_curve=True).evidence
        '345 of 400, by the curve of its noise'
        """
        return f"{self.correct} of {self.guesses}{', by the curve of its noise' if self.uses_curve else ''}"


def probability_bound(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of guessing so many canaries right, or more, under (epsilon, delta)-DP.

    With f(v) = P[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v] for r guesses, v of them correct,
    and m canaries the bound is f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, at most 1.

    Args:
        canaries: m.
        guesses: r.
        right: v.
        epsilon: at least 0.
        delta: in [0, 1).

    >>> round(probability_bound(canaries=10, guesses=10, right=10, epsilon=0.0, delta=0.0) * 2**10)
    1
    """
    from scipy.special import expit
    from scipy.stats import binom

    guess_probability = float(expit(epsilon))
    tail = float(binom.sf(right - 1, guesses, guess_probability))
    if not delta or not right:
        return tail
    fewer = np.arange(1, right + 1)
    increases = (binom.sf(right - fewer - 1, guesses, guess_probability) - tail) / fewer
    return min(1.0, tail + 2 * canaries * delta * float(increases.max()))


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return the epsilon up to which so many correct guesses are rarer than 1 - `confidence`.

    Args:
        canaries: m, each in or out by a fair coin.
        guesses: r, at most m.
        right: v, the correct guesses, at most r.
        delta: the delta of the promise, in [0, 1).
        confidence: in (0, 1).

    Returns:
        The lower bound; 0 where nothing is refuted.
    """
    from scipy.optimize import bisect

    def excess_probability(epsilon: float) -> float:
        return probability_bound(canaries, guesses, right, epsilon, delta) - (1 - confidence)

    if not guesses or excess_probability(0.0) >= 0:
        return 0.0
    return float(bisect(excess_probability, 0.0, _MAX_EPSILON, xtol=1e-6))


def best_lower_bound(
    scores: Tensor,
    inside: Tensor,
    delta: float,
    confidence: float,
    mechanisms: Sequence[Mechanism] = (),
    curve_kinds: int = 1,
) -> EpsilonBound:
    """Compute the best lower bound, guessing the highest scores in and as many of the lowest out.

    The outcome chooses how many are guessed, among `GUESS_SHARES`, and by which scores. Each bound
    is therefore made at a higher confidence, so that all of them hold together at `confidence`.

    Args:
        scores: `canary`, or `kind canary`; the higher, the likelier the canary is in. Of equal
            scores the first counts as lower.
        inside: `canary`, whether it is in.
        delta: as in `lower_bound`.
        confidence: of all bounds together, in (0, 1).
        mechanisms: what the canaries passed, as it is declared. Its trade-off curve gives further
            bounds. Empty where nothing is declared.
        curve_kinds: by how many kinds of scores, the first ones, bounds by the curve are made.
    """
    kinds = scores.reshape(-1, scores.shape[-1])
    error = 1 - confidence
    bounds = []
    if mechanisms:
        curve_confidence = 1 - CURVE_ERROR * error / len(kinds[:curve_kinds])
        for kind in kinds[:curve_kinds]:
            guesses, right = _count_right(kind, inside, CURVE_SHARE)
            epsilon = curve_lower_bound(mechanisms, len(inside), guesses, right, delta, curve_confidence)
            bounds.append(
                EpsilonBound(epsilon=epsilon, canaries=len(inside), guesses=guesses, correct=right, uses_curve=True)
            )
        error *= 1 - CURVE_ERROR
    pair_confidence = 1 - error / (len(GUESS_SHARES) * len(kinds))
    for kind, share in product(kinds, GUESS_SHARES):
        guesses, right = _count_right(kind, inside, share)
        epsilon = lower_bound(len(inside), guesses, right, delta, pair_confidence)
        bounds.append(EpsilonBound(epsilon=epsilon, canaries=len(inside), guesses=guesses, correct=right))
    return max(bounds, key=lambda bound: bound.epsilon)


def _count_right(scores: Tensor, inside: Tensor, share: float) -> tuple[int, int]:
    """Return how many canaries are guessed by their scores, and how many of the guesses are right."""
    order = scores.argsort(stable=True)
    half = max(1, math.floor(share * len(order) / 2))
    right = int((~inside[order[:half]]).sum()) + int(inside[order[-half:]].sum())
    return 2 * half, right
