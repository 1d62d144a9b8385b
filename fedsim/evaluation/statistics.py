"""What is computed from scores: floors, paired differences, intervals over victims, clients and seeds, sign tests."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_CHANCE = 0.05
_DRAWS = 4000
Values = NDArray[np.float64]


def best_guess(guesses: Mapping[str, float], *, higher_is_better: bool) -> tuple[str, float]:
    """The guess that a finding has to beat, and what it gets; an empty name and NaN where there is none.

    Of equal guesses it is the first.
    """
    best = (max if higher_is_better else min)(guesses, key=lambda name: guesses[name], default="")
    return best, guesses.get(best, math.nan)


def gains(values: Values, floors: Values, *, higher_is_better: bool) -> Values:
    """By how much each value is beyond its own floor, in the direction of leakage; negative where it falls short."""
    return values - floors if higher_is_better else floors - values


def mean(values: Values) -> float:
    """The mean; NaN of no values."""
    return float(values.mean()) if len(values) else math.nan


def interval(
    values: Values, *, share: bool = False, lowest: float = -math.inf, highest: float = math.inf
) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of `values`; NaN for fewer than two, or where one is not finite.

    Of a share it is Gaffke's bound, see `share_interval`. Otherwise it is Student's, cut where the range of the values
    ends. A perfect reconstruction has an infinite PSNR, about which no interval can be said.
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    if share:
        return share_interval(values)
    margin = float(values.std(ddof=1) / math.sqrt(len(values))) * _student(len(values) - 1)
    return max(float(values.mean()) - margin, lowest), min(float(values.mean()) + margin, highest)


def share_interval(values: Values) -> tuple[float, float]:
    """The interval of the mean of values in [0, 1].

    It is a bootstrap over the values and the two ends of the range: means under random weights (Dirichlet, all 1) of
    the values and 0 give the lower limit, of the values and 1 the upper one (Gaffke's bound, see Phan, Thomas and
    Learned-Miller, ICML 2021), by draws. It stays within [0, 1]; where each value is 0 or 1 it is Clopper and Pearson's
    binomial interval, exactly. The plain bootstrap has no width where few values happen to be equal, and Student's
    interval leaves [0, 1] and covers too seldom where values fall into two heaps; this one has neither fault, at the
    price of being wide for few values.
    """
    if np.isin(values, (0, 1)).all():
        return _binomial_interval(int(values.sum()), len(values))
    weights = np.random.default_rng(0).dirichlet(np.ones(len(values) + 1), _DRAWS)
    ends = ((0.0, 0.025), (1.0, 0.975))
    low, high = (float(np.quantile(weights @ np.append(np.sort(values), end), level)) for end, level in ends)
    return max(low, 0.0), min(high, 1.0)  # but for rounding, they lie there


def _binomial_interval(successes: int, count: int) -> tuple[float, float]:
    from scipy.special import betaincinv  # which takes a quarter of a second to import; workers do without

    failures, tail = count - successes, (1 - 0.95) / 2
    low = float(betaincinv(successes, failures + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - tail)) if failures else 1.0
    return low, high


def more_than_half(ahead: int, count: int, chance: float = _CHANCE, *, expected: float = 0.5) -> bool:
    """Whether chance gives so many of `count`, or more, in at most this share of cases (sign test).

    Args:
        ahead: how many are ahead of their floors.
        count: how many there are.
        chance: the share of cases.
        expected: how often a guess is ahead of its own floor: a coin toss, unless scores take few values.
    """
    from scipy.special import bdtrc  # likewise

    return float(bdtrc(ahead - 1, count, expected)) <= chance


def fewer_than_half(ahead: int, count: int) -> bool:
    """The same of so few, or fewer."""
    from scipy.special import bdtr  # likewise

    return float(bdtr(ahead, count, 0.5)) <= _CHANCE


def mean_and_margin(values: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Mean of values by (client, run), and half the width of its 95 % interval; 0 where the values do not vary.

    Clients and seeds both vary, and a client holds much the same in each run: three runs of it are not three clients.
    So the squared standard errors of two means are added, that over clients (each a mean over runs) and that over runs
    (each a mean over clients), which is a little too much; Satterthwaite's degrees of freedom.
    """
    clients, runs = (sorted(set(names)) for names in zip(*values, strict=True))
    table = np.array([[values.get((client, run), np.nan) for run in runs] for client in clients])
    sides = [side for side in (np.nanmean(table, 1), np.nanmean(table, 0)) if len(side) > 1]
    errors = np.array([side.var(ddof=1) / len(side) for side in sides])
    centre = float(np.mean(list(values.values())))
    if not errors.sum():
        return centre, 0.0
    freedom = errors.sum() ** 2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, sides, strict=True))
    return centre, _student(freedom) * float(np.sqrt(errors.sum()))


def _student(freedom: float) -> float:
    """How many standard errors to either side are 95 % of Student's distribution."""
    from scipy.special import stdtrit  # likewise

    return float(stdtrit(freedom, 0.975))


def mean_text(values: Mapping[tuple[str, str], float]) -> str:
    """`mean ± margin`, see `mean_and_margin`."""
    centre, margin = mean_and_margin(values)
    return f"{centre:.3f} ± {margin:.3f}" if margin else f"{centre:.3f}"
