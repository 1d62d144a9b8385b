"""Statistics of scores: floors, differences from floors, confidence intervals and sign tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SIGNIFICANCE = 0.05
"""How often a test may find what is not there."""
CONFIDENCE = 1 - SIGNIFICANCE
"""Level of an interval unless another is named."""
NORMAL_QUANTILE = 1.96
"""Half the width of the central 95 % of the normal distribution, in standard deviations."""
_ROUNDING = 1e-6
"""Difference of two scores, as a share of the smaller one, up to which rounding errors of float32 may make it."""
_BOOTSTRAP_DRAWS = 4000
Values = NDArray[np.float64]


def best_guess(guesses: Mapping[str, float], *, higher_is_better: bool) -> tuple[str, float]:
    """Return the name and the value of the best guess; an empty name and NaN where there is none.

    Of equal guesses the first one is returned.

    >>> best_guess({"noise": 9.1, "mid-grey": 11.5}, higher_is_better=True)
    ('mid-grey', 11.5)
    """
    better_of = max if higher_is_better else min
    best = better_of(guesses, key=lambda name: guesses[name], default="")
    return best, guesses.get(best, math.nan)


def subtract_scores(values: Values | float, others: Values | float) -> Values:
    """Return the differences of scores; 0 where they are the same but for rounding errors, such as two infinite ones.

    A test that counts signs would take a rounding error that goes the same way for each victim for a leak.

    >>> subtract_scores(0.1 + 2e-9, 0.1).item(), subtract_scores(1e-9, 0.0).item()
    (0.0, 1e-09)
    """
    values, others = np.asarray(values), np.asarray(others)
    with np.errstate(invalid="ignore"):  # two infinite values, which are equal
        differences = values - others
        are_same = np.abs(differences) <= _ROUNDING * np.minimum(np.abs(values), np.abs(others))
    return np.where((values == others) | are_same, 0.0, differences)


def gains(values: Values, floors: Values, *, higher_is_better: bool) -> Values:
    """Return by how much each value beats its own floor; negative where it does not reach it."""
    differences = subtract_scores(values, floors)
    return differences if higher_is_better else -differences


def mean(values: Values) -> float:
    """Return the mean; NaN where there are no values."""
    return float(values.mean()) if len(values) else math.nan


def confidence_interval(
    values: Values,
    *,
    share: bool = False,
    lowest: float = -math.inf,
    highest: float = math.inf,
    level: float = CONFIDENCE,
) -> tuple[float, float]:
    """Return the confidence interval of the mean of `values`.

    For a share it is Gaffke's bound, see `share_interval`. Otherwise it is Student's, cut where the
    range of the values ends. It is NaN for fewer than two values, or where one is not finite: a
    perfect reconstruction has an infinite PSNR, for which there is no interval.

    Args:
        share: values are shares, in [0, 1].
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    if share:
        return share_interval(values, level)
    margin = float(values.std(ddof=1) / math.sqrt(len(values))) * _student_quantile(len(values) - 1, level)
    return max(float(values.mean()) - margin, lowest), min(float(values.mean()) + margin, highest)


def share_interval(values: Values, level: float = CONFIDENCE) -> tuple[float, float]:
    """Return the confidence interval of the mean of values in [0, 1] (Gaffke's bound).

    It is a bootstrap over the values and the two ends of the range: means of the values and 0 under
    random weights (Dirichlet, all 1) give the lower limit, those of the values and 1 the upper one
    [Phan2021]. It stays within [0, 1]; where each value is 0 or 1 it is exactly the binomial
    interval of Clopper and Pearson. The plain bootstrap has no width where a few values happen to
    be equal, and Student's interval leaves [0, 1] and covers too seldom where values fall into two
    clusters; this one has neither fault, at the price of being wide for few values.
    """
    if np.isin(values, (0, 1)).all():
        return binomial_interval(int(values.sum()), len(values), level)
    weights = _draw_weights(len(values) + 1)
    ordered = np.sort(values)
    low = float(np.quantile(weights @ np.append(ordered, 0.0), (1 - level) / 2))
    high = float(np.quantile(weights @ np.append(ordered, 1.0), (1 + level) / 2))
    return max(low, 0.0), min(high, 1.0)  # rounding may put them outside


@lru_cache(maxsize=8)
def _draw_weights(count: int) -> Values:
    """Draw random weights, a row for each draw; the same ones each time."""
    return np.random.default_rng(0).dirichlet(np.ones(count), _BOOTSTRAP_DRAWS)


def widen_interval(low: float, high: float, mean: float, reach: float) -> tuple[float, float]:
    """Widen the interval of a mean by an error that all its values have in common.

    Args:
        reach: how far the interval of that error alone extends to either side.

    >>> widen_interval(6.0, 14.0, 10.0, 3.0)
    (5.0, 15.0)
    """
    return mean - math.hypot(mean - low, reach), mean + math.hypot(high - mean, reach)


def binomial_interval(successes: int, count: int, level: float = CONFIDENCE) -> tuple[float, float]:
    """Return the confidence interval of a share of which `successes` of `count` were seen (Clopper and Pearson).

    >>> tuple(round(limit, 3) for limit in binomial_interval(0, 4))
    (0.0, 0.602)
    """
    from scipy.special import betaincinv  # takes a quarter of a second, which workers save

    failures, tail = count - successes, (1 - level) / 2
    low = float(betaincinv(successes, failures + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - tail)) if failures else 1.0
    return low, high


def is_more_than_half(ahead: int, count: int, chance: float = SIGNIFICANCE, *, expected: float = 0.5) -> bool:
    """Return whether significantly more than expected are ahead of their floors (sign test).

    Args:
        ahead: number of findings that are ahead of their floors.
        expected: how often a guess is ahead of its own floor: a coin toss, unless scores take few
            values.

    >>> is_more_than_half(9, 10), is_more_than_half(8, 10)
    (True, False)
    """
    from scipy.special import bdtrc  # likewise

    return float(bdtrc(ahead - 1, count, expected)) <= chance


def is_fewer_than_half(ahead: int, count: int) -> bool:
    """Return whether significantly fewer than half are ahead of their floors (sign test)."""
    from scipy.special import bdtr  # likewise

    return float(bdtr(ahead, count, 0.5)) <= SIGNIFICANCE


def mean_and_margin(values: Mapping[tuple[str, str], float], level: float = CONFIDENCE) -> tuple[float, float]:
    """Return the mean of values by (client, run), and half the width of its confidence interval.

    Clients and seeds both vary, and a client holds much the same data in each run: three runs of it
    are not three clients. So the squared standard errors of two means are added, that over clients
    (each a mean over runs) and that over runs (each a mean over clients), which is a little too
    much; the degrees of freedom are Satterthwaite's. The width is 0 where the values do not vary.
    """
    clients, runs = (sorted(set(names)) for names in zip(*values, strict=True))
    rows = []
    for client in clients:
        rows.append([values.get((client, run), np.nan) for run in runs])
    table = np.array(rows)
    client_means, run_means = np.nanmean(table, 1), np.nanmean(table, 0)
    varying = [means for means in (client_means, run_means) if len(means) > 1]
    squared_errors = np.array([means.var(ddof=1) / len(means) for means in varying])
    centre = float(np.mean(list(values.values())))
    if not squared_errors.sum():
        return centre, 0.0
    terms = []
    for squared_error, means in zip(squared_errors, varying, strict=True):
        terms.append(squared_error**2 / (len(means) - 1))
    freedom = squared_errors.sum() ** 2 / sum(terms)
    return centre, _student_quantile(freedom, level) * float(np.sqrt(squared_errors.sum()))


def _student_quantile(freedom: float, level: float) -> float:
    """Return the half width of the central part of Student's distribution, in standard errors."""
    from scipy.special import stdtrit  # likewise

    return float(stdtrit(freedom, (1 + level) / 2))
