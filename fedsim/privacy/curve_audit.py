"""A lower bound of epsilon from guesses about canaries, for a mechanism whose trade-off curve is known.

What `fedsim.privacy.canary_bounds` refutes is an (epsilon, delta) pair, which allows far more than most
mechanisms do. Here the curve itself is refuted: as many right guesses are too rare under it. Among
mechanisms of the declared kind, with less and less noise, the last refuted one gives the bound.

References:
    [Mahloujifar2025], the algorithm that bounds the tail of right guesses, with abstentions. Differs:
    the curves are those of the declared mechanism with its noise scaled, rather than one Gaussian, and how
    many are guessed follows from what is declared, never from the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import TradeOff, compute_composed_epsilon, compute_trade_off

_SCALINGS = np.geomspace(1 / 64, 64, 837)
"""Factors of the declared noise that are tried, 1 % apart."""
_SHARES = (0.05, 0.1, 0.2)
"""Shares of the canaries of which one is chosen to be guessed."""
_RATES = np.concatenate([[0.0], np.geomspace(1e-6, 1e-2, 401)[:-1], np.linspace(1e-2, 1, 1001)])
"""False-positive rates at which a curve is followed."""


def is_curve_refuted(curve: TradeOff, canaries: int, guesses: int, right: int, confidence: float) -> bool:
    """Return whether so many right guesses have a probability of less than 1 - `confidence` under the curve.

    Of m canaries r are guessed. Let p_i be the probability that i guesses are right, and

        hit_c = sum over i >= c of p_i i / m,  miss_c = sum over i >= c of p_i (r - i) / m,

    the probabilities that a random canary is guessed, right or wrong, while at least c guesses are
    right. To swap its coin turns one into the other with one right guess more, so that the curve f
    bounds hit_c <= 1 - f(miss_{c-1}). If at least v guesses were right with a probability of 1 -
    `confidence`, this would require more and more wrong guesses for v - 1, v - 2, ..., in the end
    more than there are: hit_0 + miss_0 > r / m.

    Args:
        curve: f, of one canary that is in or out.
        canaries: m.
        guesses: r, whatever the outcome.
        right: v.
        confidence: in (0, 1).

    >>> perfect_privacy = TradeOff(epsilons=np.array([0.0]), deltas=np.array([0.0]))
    >>> is_curve_refuted(perfect_privacy, 10, 10, 10, confidence=0.95)
    True
    >>> is_curve_refuted(perfect_privacy, 10, 10, 7, confidence=0.95)
    False
    """
    error = 1 - confidence
    hit = error * right / canaries
    miss = error * (guesses - right) / canaries
    for count in range(right - 1, -1, -1):
        required = max(miss, curve.false_positive_rate(hit))
        hit += count / (guesses - count) * (required - miss)
        miss = required
        if hit + miss > guesses / canaries:
            return True
    return False


def curve_lower_bound(
    mechanisms: Sequence[Mechanism], canaries: int, guesses: int, right: int, delta: float, confidence: float
) -> float:
    """Return the epsilon of the mechanism with the least noise that so many right guesses refute.

    Args:
        mechanisms: all that the canaries passed, as declared; their noise is scaled by one factor.
        canaries: m.
        guesses: r.
        right: v.
        delta: at which epsilon is stated.
        confidence: in (0, 1).

    Returns:
        The lower bound; 0 where nothing is refuted.
    """

    def is_refuted(scaling: float) -> bool:
        curve = compute_trade_off(scale_noise(mechanisms, scaling), replaced=False)
        return curve is not None and is_curve_refuted(curve, canaries, guesses, right, confidence)

    # Refuted are the factors from some one on: the more noise, the less may be guessed.
    low, high = 0, len(_SCALINGS)
    while low < high:
        middle = (low + high) // 2
        if is_refuted(float(_SCALINGS[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(_SCALINGS):
        return 0.0
    return compute_composed_epsilon(scale_noise(mechanisms, float(_SCALINGS[low])), delta)


def expect_right_guesses(mechanisms: Sequence[Mechanism], canaries: int, share: float, deviations: float = 1.0) -> int:
    """Return how many guesses are right where the best test guesses canaries of these mechanisms.

    Half of the guesses say that a canary is in, the other half that one is out. Canaries are taken to be independent.

    Args:
        mechanisms: all that the canaries passed.
        canaries: m, half of them in.
        share: of them that is guessed.
        deviations: by how many standard deviations fewer are right than on average.

    >>> expect_right_guesses([Mechanism(scale=1.0, neighbours="replaced")], 1000, 1.0, deviations=0.0)
    691
    """
    guesses = count_guesses(canaries, share)
    curve = compute_trade_off(mechanisms, replaced=False)
    if curve is None:
        return guesses
    hits = np.maximum.accumulate(curve.true_positive_rate(_RATES))
    taken_in, taken_out = (_RATES + hits) / 2, 1 - (_RATES + hits) / 2
    right_in = np.interp(share / 2, taken_in, hits) / share
    right_out = (1 - np.interp(1 - share / 2, 1 - taken_out, _RATES)) / share
    chance = float(min(1.0, (right_in + right_out) / 2))
    below_mean = deviations * np.sqrt(guesses * chance * (1 - chance))
    return max(0, min(guesses, int(guesses * chance - below_mean)))


def count_guesses(canaries: int, share: float) -> int:
    """Return how many canaries are guessed, as many in as out."""
    return 2 * max(1, math.floor(share * canaries / 2))


def choose_share(mechanisms: Sequence[Mechanism], canaries: int, delta: float, confidence: float) -> float:
    """Choose the share of the canaries to be guessed: that which shows most of what is declared.

    It depends on nothing that a mechanism has sent, so no confidence has to be paid for it.

    Args:
        mechanisms: all that the canaries passed, as declared.
        canaries: m.
        delta: at which epsilon is stated.
        confidence: of the bound, in (0, 1).
    """
    key = tuple(mechanisms)
    return max(_SHARES, key=lambda share: expect_bound(key, canaries, share, delta, confidence))


@lru_cache(maxsize=1024)
def expect_bound(
    mechanisms: tuple[Mechanism, ...], canaries: int, share: float, delta: float, confidence: float
) -> float:
    """Return the bound that the best test shows of these mechanisms, where slightly fewer are right than on average."""
    right = expect_right_guesses(mechanisms, canaries, share)
    return curve_lower_bound(mechanisms, canaries, count_guesses(canaries, share), right, delta, confidence)


def scale_noise(mechanisms: Sequence[Mechanism], scaling: float) -> list[Mechanism]:
    """Return the same mechanisms with noise `scaling` times as large."""
    return [replace(mechanism, scale=scaling * mechanism.scale) for mechanism in mechanisms]
