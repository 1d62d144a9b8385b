"""Differences to no defense that are drawn by chance, and how often their 95 % interval holds the true mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.report.paired_differences import PairedDifference, subtract_control
from fedsim.report.sweep_groups import paired_interval

METRICS, VICTIMS = 6, 6


@dataclass(frozen=True)
class Coverage:
    """Shares of the draws.

    Attributes:
        of_these: in which the interval holds the mean over all victims of these federations.
        of_all: in which it holds that over all seeds, which is 0.
        less: in which it is below 0.
    """

    of_these: float
    of_all: float
    less: float


def measure_coverage(seeds: int, spread: float, draws: int) -> Coverage:
    """Draw differences of PSNR for six victims in each of some seeds, whose means vary.

    Args:
        seeds: number of seeds.
        spread: of the means of seeds, as a multiple of that of the victims of a seed.
        draws: number of draws.
    """
    generator = np.random.default_rng(0)
    num_held, num_held_of_all, num_less = 0, 0, 0
    for _ in range(draws):
        effects = generator.normal(0, spread, seeds)
        values = effects[:, None] + generator.normal(size=(seeds, VICTIMS))
        differences = {}
        for seed in range(seeds):
            for victim in range(VICTIMS):  # other ones in each seed
                differences[str(victim), str(seed)] = float(values[seed, victim])
        low, high = paired_interval("psnr", differences)
        num_held += low <= effects.mean() <= high
        num_held_of_all += low <= 0 <= high
        num_less += high < 0
    return Coverage(num_held / draws, num_held_of_all / draws, num_less / draws)


def measure_false_falls(seeds: int, spread: float, shared: float, draws: int) -> tuple[float, float]:
    """Draw differences of six metrics under a defense that does nothing, and return in which share less leaks by any.

    Args:
        seeds: number of seeds.
        spread: of the means of seeds, as a multiple of that of the victims of a seed.
        shared: part of the variance that all metrics have in common.
        draws: number of draws.

    Returns:
        By the 95 % interval of each metric alone, and corrected for their number.
    """
    generator = np.random.default_rng(0)
    num_alone, num_corrected = 0, 0
    for _ in range(draws):
        effects = generator.normal(0, spread, (METRICS + 1, seeds, 1))
        values = effects + generator.normal(size=(METRICS + 1, seeds, VICTIMS))
        differences = []
        for own_part in values[1:]:
            table = np.sqrt(shared) * values[0] + np.sqrt(1 - shared) * own_part
            differences.append(_subtract_nothing(table))
        num_alone += any(item.is_less for item in differences)
        all_are_less = all(item.is_less for item in differences)
        num_corrected += all_are_less or any(item.is_less_among(METRICS) for item in differences)
    return num_alone / draws, num_corrected / draws


def _subtract_nothing(table: np.ndarray) -> PairedDifference:
    values = {(str(victim), str(seed)): float(value) for (seed, victim), value in np.ndenumerate(table)}
    difference = subtract_control("psnr", values, dict.fromkeys(values, 0.0))
    assert difference is not None
    return difference
