"""Attributes from a federated least-squares regression, as in docs/local-models.md, after Diana et al., AAAI 2025.

    python benchmarks/aia_regression.py --out runs/aia-regression

Eight clients of 50 records each, of which they train on some 30, drawn by the seed: four numbers, a category of two
that no number tells, and a target that is linear in them by weights of each client's own, plus noise of 0.5. The
weight of the category is plus or minus `effect`. Half of the clients are sampled in each round, so that the messages
determine the local models. Prints the table. It takes a minute of processor time and needs no data.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import fedsim
from fedsim.audit.evaluation.statistics import format_mean

SEEDS, CLIENTS, RECORDS, NUMBERS = (1, 2, 3), 8, 50, 4
EFFECTS = (0.5, 1.0, 2.0)
ATTACKS: list[dict[str, Any]] = [
    {"name": "lmra-linear"},
    {"name": "aia-model", "label": "aia-model, global", "source": "global"},
    {"name": "aia-model", "label": "aia-model, last-returned"},
    {"name": "aia-model", "label": "aia-model, lmra-linear", "source": "lmra-linear"},
    {"name": "aia-model", "label": "aia-model, optimal", "source": "optimal"},
    {"name": "aia-gradient", "rounds": 3, "iterations": 30},
]
METRICS = ("attribute_accuracy", "attribute_balanced_accuracy")


def table(path: Path, effect: float, seed: int) -> None:
    """Write the records."""
    rng, rows = np.random.default_rng(seed), ["client,a,b,c,d,secret,y"]
    for client in range(CLIENTS):
        weights, weight, shift = rng.normal(size=NUMBERS), effect * rng.choice([-1, 1]), rng.normal()
        inputs, secret = rng.normal(size=(RECORDS, NUMBERS)), rng.integers(2, size=RECORDS)
        target = inputs @ weights + weight * secret + shift + 0.5 * rng.normal(size=RECORDS)
        for x, s, y in zip(inputs, secret, target, strict=True):
            rows.append(",".join([str(client), *map(str, x), ("no", "yes")[s], str(y)]))
    path.write_text("\n".join(rows) + "\n")


def experiment(path: Path, seed: int) -> dict[str, Any]:
    """The run on that table."""
    return {
        "data": {"name": "csv", "path": str(path), "target": "y", "task": "regression", "group": "client"},
        "partition": {"name": "natural", "test_fraction": 0.2},
        "model": {"name": "linear"},
        "training": {"local_epochs": 1, "batch_size": 100, "learning_rate": 0.05},
        "strategy": {"name": "fedavg", "fraction_train": 0.5},
        "federation": {"clients": CLIENTS, "rounds": 80, "seed": seed, "evaluate_every": 0, "engine": "serial"},
        "adversary": {
            "victims": "all",
            "rounds": "all",
            "workers": 1,
            "knowledge": {"partial_records": "secret"},
        },
        "attack": ATTACKS,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for effect in EFFECTS:
        found: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(dict)
        for seed in SEEDS:
            path = out / f"{effect}-{seed}.csv"
            table(path, effect, seed)
            rows = fedsim.run(experiment(path, seed), out=out / f"{effect}-{seed}").scores
            for row in rows[rows["metric"].isin(METRICS)].to_dict("records"):
                key = str(row["victim"]), str(seed)
                found[str(row["attack"]), row["metric"]][key] = row["value"]
                found["floor", row["metric"]][key] = row["floor"]
        print(f"\neffect {effect}\n\n| attack | {' | '.join(METRICS)} |\n|---|---|---|")
        for attack in ["floor", *(one.get("label", one["name"]) for one in ATTACKS[1:])]:
            print(f"| {attack} | {' | '.join(format_mean(found[attack, metric]) for metric in METRICS)} |", flush=True)


if __name__ == "__main__":
    main()
