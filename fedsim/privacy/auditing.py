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
from dataclasses import dataclass
from itertools import product

import numpy as np
from torch import Tensor

GUESS_SHARES = (1.0, 0.5, 0.2, 0.05)
"""Shares of the canaries that are guessed; each is tried, and the best bound counts."""
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
    """

    epsilon: float
    canaries: int
    guesses: int
    correct: int


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


def best_lower_bound(scores: Tensor, inside: Tensor, delta: float, confidence: float) -> EpsilonBound:
    """Compute the best lower bound, guessing the highest scores in and as many of the lowest out.

    The outcome chooses how many are guessed, among `GUESS_SHARES`, and by which scores. Each bound
    is therefore made at a higher confidence, so that all of them hold together at `confidence`.

    Args:
        scores: `canary`, or `kind canary`; the higher, the likelier the canary is in. Of equal
            scores the first counts as lower.
        inside: `canary`, whether it is in.
        delta: as in `lower_bound`.
        confidence: of all bounds together, in (0, 1).
    """
    kinds = scores.reshape(-1, scores.shape[-1])
    count = kinds.shape[1]
    bound_confidence = 1 - (1 - confidence) / (len(GUESS_SHARES) * len(kinds))
    bounds = []
    for order, share in product(kinds.argsort(dim=1, stable=True), GUESS_SHARES):
        half = max(1, math.floor(share * count / 2))
        right = int((~inside[order[:half]]).sum()) + int(inside[order[-half:]].sum())
        epsilon = lower_bound(count, 2 * half, right, delta, bound_confidence)
        bounds.append(EpsilonBound(epsilon=epsilon, canaries=count, guesses=2 * half, correct=right))
    return max(bounds, key=lambda bound: bound.epsilon)
