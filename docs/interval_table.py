"""Print the table of docs/explanation/verdicts.md on how often a 95 % interval holds the mean over all victims.

Run it as `python docs/interval_table.py`; it takes half a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # as for the other tables

from fedsim.report.summary import interval

VICTIMS = (2, 3, 5, 10, 20)
DRAWS = 1000
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def draw_outliers(rng: np.random.Generator, victims: int) -> NDArray[np.float64]:
    """One victim in ten comes back with 40 dB, the others with 10."""
    return np.where(rng.random(victims) < 0.1, 40.0, 10.0) + rng.normal(0, 0.5, victims)


KINDS: dict[str, tuple[str, Draw, float]] = {
    "PSNR, normal": ("psnr", lambda rng, victims: rng.normal(15, 3, victims), 15.0),
    "PSNR, heavy tails (Student's, two degrees of freedom)": (
        "psnr",
        lambda rng, victims: 20 + 3 * rng.standard_t(2, victims),
        20.0,
    ),
    "PSNR, skewed (lognormal)": ("psnr", lambda rng, victims: 10 + rng.lognormal(0, 1, victims), 10 + np.exp(0.5)),
    "PSNR, one victim in ten with 40 dB, others with 10": ("psnr", draw_outliers, 13.0),
    "3 of 10 examples identified": (
        "identified",
        lambda rng, victims: rng.binomial(10, 0.3, victims) / 10,
        0.3,
    ),
    "all examples of one victim in ten identified": (
        "identified",
        lambda rng, victims: (rng.random(victims) < 0.1) * 1.0,
        0.1,
    ),
    "membership AUC, normal": ("membership_auc", lambda rng, victims: rng.normal(0.8, 0.04, victims), 0.8),
}
"""Metric, what draws the scores of victims, and their true mean."""


def main() -> None:
    """Print a row for each kind of score, a column for each number of victims."""
    print(f"| scores | {' | '.join(f'n = {victims}' for victims in VICTIMS)} |")
    print("|---|" + "---|" * len(VICTIMS))
    for kind, (metric, draw, mean) in KINDS.items():
        rng, cells = np.random.default_rng(0), []
        for victims in VICTIMS:
            num_held = 0
            for _ in range(DRAWS):
                low, high = interval(metric, draw(rng, victims))
                num_held += low <= mean <= high
            cells.append(f"{100 * num_held / DRAWS:.0f} %")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
