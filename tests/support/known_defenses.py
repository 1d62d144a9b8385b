"""Sweeps whose defense is known to leave a leak, and how often it is said to hold all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.report.adaptive import HOLDS
from fedsim.report.defense_outcomes import attack_outcomes
from tests.support.sweep_tables import make_rows

Scores = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Scores]
"""Draw the scores of so many victims in one seed under the defense."""
MEMBERS = 500
FLOOR_OF_RATE = (MEMBERS // 100 + 1) / (MEMBERS + 1)
"""What chance gets as the TPR at an FPR of 1 %."""


def draw_psnr(rng: np.random.Generator, victims: int) -> Scores:
    """Half a dB beyond the guess on average, with 10 dB."""
    return rng.normal(10.5, 1.5, victims)


def draw_heavy_psnr(rng: np.random.Generator, victims: int) -> Scores:
    """Likewise, with tails of Student's distribution with two degrees of freedom."""
    return 10.5 + 1.5 * rng.standard_t(2, victims)


def draw_one_victim(rng: np.random.Generator, victims: int) -> Scores:
    """One victim comes back with 25 dB, the others are 3 dB below the guess."""
    scores = rng.normal(7.0, 0.5, victims)
    scores[0] = 25.0
    return scores


def draw_some_victims(rng: np.random.Generator, victims: int) -> Scores:
    """One victim in ten comes back so, on average."""
    return np.where(rng.random(victims) < 0.1, 25.0, rng.normal(7.0, 0.5, victims))


def draw_examples(rng: np.random.Generator, victims: int) -> Scores:
    """Each of ten examples is identified with a probability of 12 %."""
    return rng.binomial(10, 0.12, victims) / 10


def draw_whole_victims(rng: np.random.Generator, victims: int) -> Scores:
    """All ten examples of a victim are identified with a probability of 12 %, or none."""
    return (rng.random(victims) < 0.12) * 1.0


def draw_members(rng: np.random.Generator, victims: int) -> Scores:
    """The AUC is 0.56 over all records, and all victims are compared with the same non-members."""
    non_members = np.sort(rng.normal(size=MEMBERS))
    scores = rng.normal(0.2135, 1.0, (victims, MEMBERS))
    shares: Scores = np.searchsorted(non_members, scores).mean(1) / MEMBERS
    return shares


def draw_rates(rng: np.random.Generator, victims: int) -> Scores:
    """The TPR is 2.7 % at an FPR of 1 %, and all victims have the threshold of the same non-members."""
    threshold = np.sort(rng.normal(size=MEMBERS))[-1 - MEMBERS // 100]
    shares: Scores = (rng.normal(0.4, 1.0, (victims, MEMBERS)) > threshold).mean(1)
    return shares


_MATCHES = {"metric": "identified", "floor": 0.01, "examples": 10.0, "floor_guess": "chance"}
KINDS: dict[str, tuple[Draw, float, dict[str, Any]]] = {
    "PSNR 0.5 dB beyond the guess": (draw_psnr, 15.0, {}),
    "the same, heavy tails": (draw_heavy_psnr, 15.0, {}),
    "one victim with 25 dB, others 3 dB below the guess": (draw_one_victim, 15.0, {}),
    "one in ten victims with 25 dB on average": (draw_some_victims, 15.0, {}),
    "12 % of the examples identified": (draw_examples, 1.0, _MATCHES),
    "all examples of 12 % of the victims identified": (draw_whole_victims, 1.0, _MATCHES),
    "membership AUC 0.56, 500 members": (
        draw_members,
        0.9,
        {"metric": "membership_auc", "floor": 0.5, "examples": 2.0 * MEMBERS},
    ),
    "membership TPR 2.7 % at FPR 1 %, 500 members": (
        draw_rates,
        0.2,
        {"metric": "tpr_at_1_in_100", "floor": FLOOR_OF_RATE, "examples": 2.0 * MEMBERS},
    ),
}
"""What draws the scores under the defense, the score without it, and columns of `sweep.csv`."""


def count_false_holds(kind: str, victims: int, seeds: int, draws: int) -> int:
    """Return in how many of `draws` the defense is said to hold by the metric of that kind."""
    draw, undefended, columns = KINDS[kind]
    rng = np.random.default_rng(0)
    num_holds = 0
    for _ in range(draws):
        rows, controls = [], []
        for seed in range(seeds):
            scores = draw(rng, victims)
            controls += make_rows([undefended] * victims, seed=seed, **columns)
            rows += make_rows(list(scores), "noise", seed=seed, **columns)
            rows += make_rows(list(scores), "noise", seed=seed, knows=True, **columns)
            for knows, value in ((False, 0.2), (True, 0.3)):  # by which the adaptive attack differs
                rows += make_rows([value] * victims, "noise", metric="mse", better="lower", seed=seed, knows=knows)
        outcomes = attack_outcomes(rows, controls, "")
        num_holds += any(item.word == HOLDS for item in outcomes if item.metric == columns.get("metric", "psnr"))
    return num_holds
