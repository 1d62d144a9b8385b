"""Guess from messages which of two neighbours a client has: a lower bound of epsilon.

A trial lets the hook act on one of two neighbours for all steps and rounds, and the adversary sees
how far the messages go in the canary's direction. The threshold is chosen on one half of the trials
and judged on the other, so one test is made, at one confidence.

References:
    [Nasr2023], for the worst-case canary and for the conversion of rates by the Gaussian curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.base.errors import format_percent
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.audit_power import find_refuted_share
from fedsim.privacy.audited_defense import AuditedDefense
from fedsim.privacy.ceilings import TradeOff, compute_tight_epsilon, compute_trade_off
from fedsim.privacy.curve_audit import scale_noise
from fedsim.privacy.noise_probes import FALSE_ALARMS, Neighbours, ProbeResult, make_neighbours

Scores = NDArray[np.float64]
CONFIDENCE = 1 - FALSE_ALARMS
_THRESHOLDS = 200


@dataclass(frozen=True, kw_only=True)
class GameResult:
    """Rates of a guess about neighbours, with their confidence limits.

    Attributes:
        epsilon: lower bound at `delta`, from the limits and no assumption on the mechanism.
        gaussian_epsilon: likewise, if the declared trade-off curve is Gaussian; NaN otherwise.
        delta: at which epsilon is stated.
        lowest_true_rate: lower limit of the true-positive rate.
        highest_false_rate: upper limit of the false-positive rate.
        ceiling: the largest true-positive rate that the promise allows at that false-positive rate.
    """

    epsilon: float
    gaussian_epsilon: float
    delta: float
    lowest_true_rate: float
    highest_false_rate: float
    ceiling: float

    @property
    def best_epsilon(self) -> float:
        """Return the larger lower bound; the Gaussian one holds where the declared curve does."""
        return self.epsilon if math.isnan(self.gaussian_epsilon) else max(self.epsilon, self.gaussian_epsilon)

    @property
    def is_broken(self) -> bool:
        """Return whether the guess is better than the promise allows."""
        return self.lowest_true_rate > self.ceiling


def largest_epsilon(trials: int, mechanism: Mechanism | None = None, delta: float = 0.0) -> float:
    """Return the largest epsilon that so many trials of each neighbour can show, if all guesses are right.

    Args:
        mechanism: what is declared; along the curve of Gaussian noise the same rates show more.
        delta: at which epsilon is stated.

    >>> round(largest_epsilon(2000), 1)
    4.3
    >>> round(largest_epsilon(2000, Mechanism(scale=1.0), delta=1e-5), 1)
    28.3
    """
    half = max(1, trials // 2)
    true_rate = (FALSE_ALARMS / 4) ** (1 / half)
    epsilon = max(0.0, math.log(true_rate / (1 - true_rate)))
    if not _has_gaussian_curve(mechanism) or true_rate <= 1 / 2:
        return epsilon
    return max(epsilon, _gaussian_epsilon(true_rate, 1 - true_rate, delta))


def _has_gaussian_curve(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and mechanism.noise == "gaussian" and mechanism.rate == 1


def describe_guesses(audited: AuditedDefense, trials: int, delta: float) -> str:
    """Say with how little noise guesses about this client would break the promised curve."""
    mechanism, promised = audited.mechanism, promised_curve(audited, delta)
    if mechanism is None:
        return "with how little noise they refute it is not known, as no mechanism is declared"
    if promised is None:
        return "they refute nothing, as so little noise is declared that nothing below 1 is proved"
    half = trials // 2
    rates = np.linspace(0, 1, 201)

    def is_refuted(noise_share: float) -> bool:
        quieter = compute_trade_off(scale_noise([mechanism], noise_share), replaced=False)
        hits = np.ones_like(rates) if quieter is None else quieter.true_positive_rate(rates)
        alarms = rates * half
        # Slightly fewer hits and more false alarms than on average.
        lowest, highest = _limit_counts(
            np.maximum(0, hits * half - np.sqrt(hits * (1 - hits) * half)),
            np.minimum(half, alarms + np.sqrt(alarms * (1 - rates))),
            half,
        )
        return bool((lowest > promised.true_positive_rate(highest)).any())

    share = find_refuted_share(is_refuted)
    if not share:
        return "they refute nothing, however little noise there is, so that the other probes alone can find it"
    return f"they refute the promised curve if there is {format_percent(share, '.0f')} of the noise or less"


def promised_curve(audited: AuditedDefense, delta: float) -> TradeOff | None:
    """Return the trade-off curve that a defense promises: of its mechanism, or else of its epsilon."""
    mechanism = audited.mechanism
    if mechanism is not None:
        return compute_trade_off([mechanism], replaced=False)
    guarantee = audited.defense.guarantee(audited.load, delta)
    if guarantee is None:
        return None
    return TradeOff(epsilons=np.array([guarantee.epsilon]), deltas=np.array([guarantee.delta]))


def play_game(audited: AuditedDefense, trials: int, delta: float) -> list[GameResult]:
    """Play the game with the worst neighbours; a result for each pair.

    Args:
        trials: of each of the two neighbours.
        delta: at which the lower bound is stated.
    """
    curve = promised_curve(audited, delta)
    results = []
    for number, pair in enumerate(_worst_neighbours(audited)):
        scores = []
        for side, is_in in enumerate((False, True)):
            draws = np.random.default_rng((audited.seed, number, side))
            side_scores = [_play_once(audited, pair, is_in, (number, side, trial), draws) for trial in range(trials)]
            scores.append(np.array(side_scores))
        results.append(judge_scores(scores[0], scores[1], curve, delta, audited.mechanism))
    return results


def _worst_neighbours(audited: AuditedDefense) -> list[Neighbours]:
    """Return the last layer's canary, alone and, of an example, beside one that points against it."""
    pairs = make_neighbours(audited)
    if audited.hook == "on_update":
        return [pairs[1]]
    return [pairs[3], pairs[5]] if audited.rate < 1 else [pairs[5]]


def _play_once(
    audited: AuditedDefense,
    pair: Neighbours,
    is_in: bool,
    key: tuple[int, ...],
    draws: np.random.Generator,
) -> float:
    """Return how far all messages of one client go in the canary's direction."""
    client = audited.new_client("game", *key)
    direction = pair.direction.double()
    total = 0.0
    for _ in range(audited.releases):
        is_sampled = is_in and (audited.rate == 1 or draws.random() < audited.rate)
        total += float(audited.release(pair.canary if is_sampled else pair.without, client) @ direction)
    return total


def judge_scores(
    without: Scores, with_canary: Scores, curve: TradeOff | None, delta: float, mechanism: Mechanism | None
) -> GameResult:
    """Choose a threshold on the first halves of the scores, and judge it on the second halves.

    Args:
        without: scores of trials without the canary.
        with_canary: scores of trials with it.
        curve: what is promised; None for nothing.
        delta: at which the lower bound is stated.
        mechanism: what is declared; None for nothing.
    """
    half = len(without) // 2
    pooled = np.concatenate([without[:half], with_canary[:half]])
    thresholds = np.quantile(pooled, np.linspace(0, 1, _THRESHOLDS + 2)[1:-1])
    best, threshold = -math.inf, float(thresholds[0])
    for candidate in thresholds:
        rates = _limit_rates(without[:half], with_canary[:half], float(candidate))
        allowed = 1.0 if curve is None else float(curve.true_positive_rate(rates[1]))
        quality = max(_epsilon_of_rates(*rates, delta), 100 * (rates[0] - allowed))
        if quality > best:
            best, threshold = quality, float(candidate)
    true_rate, false_rate = _limit_rates(without[half:], with_canary[half:], threshold)
    gaussian = math.nan
    if _has_gaussian_curve(mechanism):
        middle = float(np.median(pooled))
        gaussian = _gaussian_epsilon(*_limit_rates(without[half:], with_canary[half:], middle), delta)
    return GameResult(
        epsilon=max(0.0, _epsilon_of_rates(true_rate, false_rate, delta)),
        gaussian_epsilon=gaussian,
        delta=delta,
        lowest_true_rate=true_rate,
        highest_false_rate=false_rate,
        ceiling=1.0 if curve is None else float(curve.true_positive_rate(false_rate)),
    )


def _limit_rates(without: Scores, with_canary: Scores, threshold: float) -> tuple[float, float]:
    """Return the lower limit of the true-positive rate and the upper one of the false-positive rate."""
    hits, alarms = np.array([(with_canary > threshold).sum()]), np.array([(without > threshold).sum()])
    lowest, highest = _limit_counts(hits, alarms, len(without))
    return float(lowest[0]), float(highest[0])


def _limit_counts(hits: NDArray[Any], alarms: NDArray[Any], count: int) -> tuple[Scores, Scores]:
    """Return the lower limits of true-positive rates and the upper ones of false-positive rates, from counts."""
    from scipy.special import betaincinv

    # Both limits hold at once, for both ends of the curve and the Gaussian conversion.
    tail = FALSE_ALARMS / 4
    lowest = np.where(hits > 0, betaincinv(np.maximum(hits, 1e-9), count - hits + 1, tail), 0.0)
    highest = np.where(alarms < count, betaincinv(alarms + 1, np.maximum(count - alarms, 1e-9), 1 - tail), 1.0)
    return lowest, highest


def _epsilon_of_rates(true_rate: float, false_rate: float, delta: float) -> float:
    """Return the epsilon that these rates refute all smaller ones of."""
    bounds = []
    for above, below in ((true_rate, false_rate), (1 - false_rate, 1 - true_rate)):
        if above > delta and below > 0:
            bounds.append(math.log((above - delta) / below))
    return max(bounds, default=0.0)


def _gaussian_epsilon(true_rate: float, false_rate: float, delta: float) -> float:
    """Return the epsilon of the Gaussian curve through these rates."""
    from scipy.special import ndtri

    distance = float(ndtri(true_rate) - ndtri(false_rate))
    return compute_tight_epsilon(Mechanism(scale=1 / distance), delta) if distance > 0.01 else 0.0


def probe_guesses(audited: AuditedDefense, trials: int, delta: float) -> tuple[ProbeResult, GameResult]:
    """Play the game, and say whether guesses are better than the promise allows."""
    results = play_game(audited, trials, delta)
    best = max(results, key=lambda result: (result.is_broken, result.epsilon))
    question = f"guesses of neighbours from {audited.releases} releases are not better than promised"
    violation = ""
    if best.is_broken:
        violation = (
            f"guesses find at least {best.lowest_true_rate:.4g} of canaries with at most {best.highest_false_rate:.4g} "
            f"false alarms, and the promise allows {best.ceiling:.4g}; the messages reveal more than is accounted for"
        )
    seen = f"epsilon at least {best.epsilon:.3g} at delta {delta:g}"
    if not math.isnan(best.gaussian_epsilon):
        seen += f", {best.gaussian_epsilon:.3g} by the Gaussian curve"
    return ProbeResult(question=question, violation=violation, seen=seen), best
