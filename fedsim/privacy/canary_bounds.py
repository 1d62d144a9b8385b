"""A lower bound of epsilon from guesses about canaries, as an audit in one training run gives it.

Each of m canaries is in the data or not, by a fair coin of its own. An adversary that sees what the
mechanism published guesses some of the coins. Nobody can guess too many of them right if the
mechanism keeps its promise, so many correct guesses refute every epsilon below some value.

References:
    [Steinke2023], the main theorem for (epsilon, delta)-differential privacy with abstentions, and
    App. D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from torch import Tensor

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_trade_off
from fedsim.privacy.curve_audit import choose_share, count_guesses, curve_lower_bound

GUESS_SHARES = (1.0, 0.5, 0.2, 0.05)
"""Shares of the canaries that are guessed; each is tried, and the best bound counts."""
CURVE_ERRORS = (0.6, 0.2)
"""Parts of the error probability for the two bounds by a declared curve, which show more than others.

The first is of as many guesses as show most where the declaration holds, see `choose_share`; the
second of all canaries, which shows most where there is hardly any noise."""
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
        curve_kinds: by how many kinds of scores, the first ones, bounds by the curve are made; not more than
            there are. Bounds of any mechanism are then made by the other kinds, where there are some.
    """
    kinds = scores.reshape(-1, scores.shape[-1])
    error = 1 - confidence
    bounds = []
    # Of hardly any noise no curve is known, which is a matter of the declaration alone.
    if mechanisms and compute_trade_off(mechanisms, replaced=False) is not None:
        for share, confidence_of_kind in choose_curve_tests(mechanisms, len(inside), delta, confidence, curve_kinds):
            for kind in kinds[:curve_kinds]:
                guesses, right = _count_right(kind, inside, share)
                epsilon = curve_lower_bound(mechanisms, len(inside), guesses, right, delta, confidence_of_kind)
                bounds.append(
                    EpsilonBound(epsilon=epsilon, canaries=len(inside), guesses=guesses, correct=right, uses_curve=True)
                )
        error *= 1 - sum(CURVE_ERRORS)
        # Kinds without a bound by the curve find what no declaration has, such as noise that does not vary.
        kinds = kinds[curve_kinds:] if len(kinds) > curve_kinds else kinds
    pair_confidence = 1 - error / (len(GUESS_SHARES) * len(kinds))
    for kind, share in product(kinds, GUESS_SHARES):
        guesses, right = _count_right(kind, inside, share)
        epsilon = lower_bound(len(inside), guesses, right, delta, pair_confidence)
        bounds.append(EpsilonBound(epsilon=epsilon, canaries=len(inside), guesses=guesses, correct=right))
    return max(bounds, key=lambda bound: bound.epsilon)


def choose_curve_tests(
    mechanisms: Sequence[Mechanism], canaries: int, delta: float, confidence: float, curve_kinds: int = 1
) -> list[tuple[float, float]]:
    """Return the shares of the canaries that are guessed for bounds by the curve, each with its confidence.

    Nothing that was sent is asked; see `best_lower_bound` for the arguments.
    """
    chosen, of_all = (1 - part * (1 - confidence) / curve_kinds for part in CURVE_ERRORS)
    return [(choose_share(mechanisms, canaries, delta, chosen), chosen), (1.0, of_all)]


def _count_right(scores: Tensor, inside: Tensor, share: float) -> tuple[int, int]:
    """Return how many canaries are guessed by their scores, and how many of the guesses are right."""
    order = scores.argsort(stable=True)
    half = count_guesses(len(order), share) // 2
    right = int((~inside[order[:half]]).sum()) + int(inside[order[-half:]].sum())
    return 2 * half, right
