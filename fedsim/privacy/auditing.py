"""A lower bound of epsilon from guesses about canaries: what an audit in one run can show.

Each of m canaries is in the data or not, by a fair coin of its own. An adversary who sees what the mechanism published
guesses some of the coins. Nobody can guess too many of them right if the mechanism keeps its promise, so many right
guesses refute every epsilon below some value.

References:
    Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023, the main theorem for
    (epsilon, delta)-differential privacy with abstentions, and App. D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from torch import Tensor

GUESSED = (1.0, 0.5, 0.2, 0.05)
"""Shares of the canaries that are guessed; each is tried, and the best bound counts."""
_MOST = 50.0
"""Above this epsilon, float64 cannot tell e^epsilon / (1 + e^epsilon), the chance to guess right, from 1."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a mechanism with canaries.

    Attributes:
        epsilon: lower bound; smaller ones are refuted at the confidence that was asked for.
        canaries: m.
        guesses: of how many canaries the adversary guessed whether they are in; it abstained on the others.
        right: how many guesses were right.
    """

    epsilon: float
    canaries: int
    guesses: int
    right: int


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The largest probability of guessing so many canaries right, or more, under (epsilon, delta)-DP.

    With f(v) = P[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v] of r guesses, v of them right, and m canaries it is
    f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, at most 1.
    """
    from scipy.special import expit
    from scipy.stats import binom

    alone = float(expit(epsilon))
    tail = float(binom.sf(right - 1, guesses, alone))
    if not delta or not right:
        return tail
    fewer = np.arange(1, right + 1)
    slopes = (binom.sf(right - fewer - 1, guesses, alone) - tail) / fewer
    return min(1.0, tail + 2 * canaries * delta * float(slopes.max()))


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The epsilon up to which `right` of `guesses` would be rarer than 1 - `confidence`; 0 where nothing is refuted.

    Args:
        canaries: m, each in or out by a fair coin.
        guesses: r, at most m.
        right: v, at most r.
        delta: the delta of the promise, in [0, 1).
        confidence: in (0, 1).
    """
    from scipy.optimize import bisect

    def excess(epsilon: float) -> float:
        return chance(canaries, guesses, right, epsilon, delta) - (1 - confidence)

    if not guesses or excess(0.0) >= 0:
        return 0.0
    return float(bisect(excess, 0.0, _MOST, xtol=1e-6))


def measured(scores: Tensor, inside: Tensor, delta: float, confidence: float) -> Measured:
    """The best lower bound by guessing the canaries of the highest scores in, as many of the lowest out.

    How many are guessed, and by which scores, is chosen by the outcome, among `GUESSED` and the scores; for that each
    bound is made at a higher confidence, so that all of them hold together at `confidence`.

    Args:
        scores: `canary`, or `kind canary`, the higher, the likelier it is in; of equal ones the first counts as lower.
        inside: `canary`, whether it is in.
        delta: as in `lower_bound`.
        confidence: likewise.
    """
    kinds = scores.reshape(-1, scores.shape[-1])
    count, each, found = kinds.shape[1], 1 - (1 - confidence) / (len(GUESSED) * len(kinds)), []
    for order, share in product(kinds.argsort(dim=1, stable=True), GUESSED):
        half = max(1, math.floor(share * count / 2))
        right = int((~inside[order[:half]]).sum()) + int(inside[order[-half:]].sum())
        epsilon = lower_bound(count, 2 * half, right, delta, each)
        found.append(Measured(epsilon=epsilon, canaries=count, guesses=2 * half, right=right))
    return max(found, key=lambda item: item.epsilon)
