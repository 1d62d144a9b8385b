"""Rows of `sweep.csv` written by hand: what attacks got with and without defenses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FLOOR = 10.0
LEAKING = [15.0, 16.0, 15.5, 14.5, 15.2, 15.8]
"""PSNR of six victims, whose floor is 10."""
HALVED = [12.4, 13.1, 12.6, 12.2, 12.5, 12.9]
AT_FLOOR = [9.0, 9.5, 9.2, 9.4, 9.1, 9.3]


def make_rows(
    values: Sequence[float],
    defense: str = "none",
    *,
    attack: str = "sme",
    metric: str = "psnr",
    seed: int = 0,
    knows: bool = False,
    floor: float = FLOOR,
    **columns: Any,
) -> list[dict[str, str]]:
    """Return the rows of one attack by one metric, with a score for each victim."""
    rows = []
    for victim, value in enumerate(values):
        row = {
            "cell": f"{defense} {attack} {seed}", "federation": f"{defense} {seed}", "control": f"none {attack} {seed}",
            "defense": defense, "seed": seed, "attack": attack, "knows_defenses": int(knows), "baseline": 0,
            "victim": victim, "round": "1", "repeat": 0, "metric": metric, "value": value, "floor": floor,
            "floor_guess": "noise", "ceiling": "", "better": "higher", "examples": 4.0, "accuracy": 0.9,
            "client_accuracy": "", "guess": 0.1, "num_evaluated": 500, "proved_epsilon": "", "measured_epsilon": "",
            "bytes": 100.0, "seconds": 1.0, "run": f"../cells/{defense}",
        }  # fmt: skip
        rows.append({name: str(cell) for name, cell in (row | columns).items()})
    return rows


def make_both(values: Mapping[bool, Sequence[float]], defense: str, **columns: Any) -> list[dict[str, str]]:
    """Return the rows of the naive attack (False) and of the adaptive one (True)."""
    rows = []
    for knows, scores in values.items():
        rows += make_rows(scores, defense, knows=knows, **columns)
    return rows
