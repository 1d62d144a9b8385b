"""Differences to no defense that are drawn by chance, and how often their 95 % interval holds the true mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.report.sweep_groups import paired_interval

VICTIMS = 6


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
