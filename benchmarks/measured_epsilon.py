"""Proved and measured epsilon of DP-SGD and of noise on updates in a small federation, as in docs/defenses.md.

    python benchmarks/measured_epsilon.py --out runs/epsilon

Two minutes on an idle core. Runs that are there already are read again.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from attack_study import accuracy, run

SEEDS = (0, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    "dp-sgd, epsilon 1": {"name": "dp-sgd", "epsilon": 1.0},
    "dp-sgd, epsilon 4": {"name": "dp-sgd", "epsilon": 4.0},
    "dp-sgd, epsilon 10": {"name": "dp-sgd", "epsilon": 10.0},
    "dp-sgd, hardly any noise": {"name": "dp-sgd", "noise_multiplier": 0.01},
    "update-noise, sigma 20": {"name": "update-noise", "noise_multiplier": 20.0},
    "update-noise, sigma 5": {"name": "update-noise", "noise_multiplier": 5.0},
    "update-noise, sigma 2": {"name": "update-noise", "noise_multiplier": 2.0},
    "update-noise, Laplace, sigma 20": {"name": "update-noise", "noise": "laplace", "noise_multiplier": 20.0},
    "update-noise, no noise": {"name": "update-noise", "noise_multiplier": 0.0},
}


def tables(defense: dict[str, Any], seed: int, *, canaries: bool) -> dict[str, Any]:
    """Ten clients with 100 digits each; the first carries 2000 canaries."""
    found: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 100},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"local_steps": 10, "batch_size": 10, "learning_rate": 0.1},
        "federation": {"clients": 10, "rounds": 10, "seed": seed, "evaluate_every": 10},
        "defense": [defense],
        "adversary": {"when": "never"},
    }
    return found | ({"canaries": {"count": 2000, "confidence": 0.95}} if canaries else {})


def row(out: Path, place: int, case: str, defense: dict[str, Any]) -> str:
    """A line of the table."""
    measured, guesses, accuracies = [], [], []
    for seed in SEEDS:
        made = run(out / f"{place}-{seed}", tables(defense, seed, canaries=True))
        plain = run(out / f"{place}-{seed}-without", tables(defense, seed, canaries=False))
        (found,) = made.epsilons.to_dict("records")
        measured.append(f"{found['measured']:.2f}")
        guesses.append(f"{found['right']} of {found['guesses']}")
        accuracies.append((accuracy(made), accuracy(plain)))
    proved = f"{found['proved']:.3g}" if math.isfinite(found["proved"]) else "nothing"
    with_them, without = (sum(column) / len(SEEDS) for column in zip(*accuracies, strict=True))
    return f"| {case} | {proved} | {', '.join(measured)} | {', '.join(guesses)} | {with_them:.1%} | {without:.1%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    print("| defense | proved | measured, three seeds | right guesses | accuracy | without canaries |")
    print("|---|---|---|---|---|---|")
    for place, (case, defense) in enumerate(CASES.items()):
        print(row(out, place, case, defense), flush=True)


if __name__ == "__main__":
    main()
