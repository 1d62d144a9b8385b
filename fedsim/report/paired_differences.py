"""Differences between scores with and without a defense, paired by victim and seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedsim.audit.evaluation import statistics
from fedsim.interfaces.metric import describe_metric
from fedsim.report.differences import FEWEST, ONE_SIDED_LEVEL, subtract_pairs
from fedsim.report.sweep_groups import MIN_SEEDS, Unit, paired_interval


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean difference to no defense, over victims and seeds.

    Attributes:
        mean: of them, towards leakage, so that a negative one is less leakage; for accuracy as it is.
        low: where its 95 % interval begins; NaN where there is none.
        shared_error: standard error that all victims have in common, see `subtract_control`.
        is_less: whether it is below 0 beyond uncertainty, see also `is_less_among`.
        is_more: whether it is above 0 beyond uncertainty.
        is_equal: whether all scores are the same, of at least `FEWEST` pairs.
    """

    metric: str
    differences: Mapping[Unit, float]
    mean: float
    low: float
    high: float
    shared_error: float
    count: int
    num_victims: int
    num_seeds: int
    is_less: bool
    is_more: bool
    is_equal: bool

    @property
    def is_measured(self) -> bool:
        """Whether its uncertainty is known."""
        return math.isfinite(self.low) or (not math.isfinite(self.mean) and self.num_victims >= FEWEST)

    def falls_by_at_most(self, margin: float) -> bool:
        """Return whether it is shown that no more than `margin` less leaks."""
        return self.is_equal or self.low >= -margin

    def is_less_among(self, count: int) -> bool:
        """Return whether it is below 0 beyond uncertainty as one of `count` differences (Bonferroni's correction)."""
        level = 1 - statistics.SIGNIFICANCE / count
        if not all(map(math.isfinite, self.differences.values())):
            return _compare_signs(self.differences, ONE_SIDED_LEVEL / count)[0]
        ends = paired_interval(self.metric, self.differences, level)
        return _widen(ends, self.mean, self.shared_error, level)[1] < 0

    @property
    def text(self) -> str:
        """Mean with its sign, and interval where there is one."""
        return signed_text(self.mean, self.low, self.high)


def subtract_control(
    metric: str,
    values: Mapping[Unit, float],
    control: Mapping[Unit, float],
    *,
    exact: Collection[Unit] = (),
    shared_error: float = 0.0,
) -> PairedDifference | None:
    """Subtract the scores without a defense, by victim and seed and towards leakage; None where nothing is paired.

    Args:
        exact: those of whom all claims are exact with the defense and without.
        shared_error: standard error of a seed that all its victims have in common, such as by candidates that they
            share; from three seeds on, the seeds tell it themselves.
    """
    sign = 1 if describe_metric(metric).higher_is_better else -1
    pairs = subtract_pairs(metric, values, control, exact)
    differences = {unit: sign * difference for unit, difference in pairs.items()}
    if not differences:
        return None
    num_seeds = len({seed for _, seed in differences})
    shared_error = shared_error / math.sqrt(num_seeds) if num_seeds < MIN_SEEDS and any(differences.values()) else 0.0
    mean = float(np.mean(list(differences.values())))
    low, high = _widen(paired_interval(metric, differences), mean, shared_error)
    is_less, is_more = high < 0, low > 0
    if not all(map(math.isfinite, differences.values())):
        is_less, is_more = _compare_signs(differences, ONE_SIDED_LEVEL)
    return PairedDifference(
        metric=metric,
        differences=differences,
        mean=mean,
        low=low,
        high=high,
        shared_error=shared_error,
        count=len(differences),
        num_victims=len({victim for victim, _ in differences}),
        num_seeds=num_seeds,
        is_less=is_less,
        is_more=is_more,
        is_equal=len(differences) >= FEWEST and not any(differences.values()),
    )


def _widen(
    ends: tuple[float, float], mean: float, error: float, level: float = statistics.CONFIDENCE
) -> tuple[float, float]:
    """Widen the interval of a mean by an error that all its values have in common."""
    if not error:
        return ends
    return statistics.widen_interval(*ends, mean, NormalDist().inv_cdf((1 + level) / 2) * error)


def _compare_signs(differences: Mapping[Unit, float], chance: float) -> tuple[bool, bool]:
    """Return whether significantly many victims leak less, and more (sign test), where a difference is infinite."""
    by_victim: dict[str, list[float]] = defaultdict(list)
    for (victim, _), value in differences.items():
        by_victim[victim].append(value)
    means = [float(np.mean(several)) for several in by_victim.values()]
    num_less, num_more = sum(mean < 0 for mean in means), sum(mean > 0 for mean in means)
    is_less, is_more = (statistics.is_more_than_half(number, len(means), chance) for number in (num_less, num_more))
    return is_less, is_more


def signed_text(mean: float, low: float, high: float, unit: str = "") -> str:
    """Format a difference with its sign, its unit and its 95 % interval, for a table that says so.

    >>> signed_text(-4.123, -5.123, -3.123, "dB"), signed_text(0.25, 0.1, 0.8), signed_text(-0.01, -1.01, 0.99)
    ('-4.1 ± 1.0 dB', '+0.25 (0.1 to 0.8)', '+0.0 ± 1.0')
    """
    margin = high - mean
    if not math.isfinite(margin) or not margin:
        text = f"{mean:+.3g}"
    elif math.isclose(mean - low, margin, rel_tol=1e-6):
        decimals = max(0, 1 - math.floor(math.log10(margin)))
        text = f"{mean:+z.{decimals}f} ± {margin:.{decimals}f}"
    else:
        ends = f"({low:.2g} to {high:.2g})"
        return f"{mean:+.3g} {unit} {ends}" if unit else f"{mean:+.3g} {ends}"
    return f"{text} {unit}" if unit else text
