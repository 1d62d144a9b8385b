"""Attacks on label distributions beside one another, as in docs/labels-and-properties.md.

    python benchmarks/labels_study.py --data-dir DIR --out runs/labels

MNIST's digits, shared out unevenly (Dirichlet), and digits by writer (LEAF's FEMNIST), a small CNN; in each run some of
the clients are attacked, in the first round and in the last. Writes results/labels.csv, one row a client, attack and
metric, and prints the tables. Runs that are there already are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attack_study import accuracy, arguments, attacked, cells, keep, run

from fedsim.audit.evaluation.statistics import format_mean

RESULTS = Path(__file__).parent / "results" / "labels.csv"
COLUMNS = ("case", "rounds", "attack", "metric", "seed", "client", "value", "floor", "guess", "accuracy")
SEEDS = (0, 1, 2)
VICTIMS, ROUNDS = 3, 10
DIGITS: dict[str, Any] = {
    "data": {"name": "mnist"},
    "partition": {"name": "dirichlet", "alpha": 0.3, "samples_per_client": 100},
}
CASES: dict[str, dict[str, Any]] = {
    "one gradient": DIGITS
    | {"training": {"local_steps": 1, "batch_size": 100}, "strategy": {"name": "fedsgd", "learning_rate": 0.2}},
    "E = 1": DIGITS | {"training": {"local_epochs": 1}},
    "E = 5": DIGITS | {"training": {"local_epochs": 5}},
    "E = 1, DP-SGD": DIGITS
    | {"training": {"local_epochs": 1}, "defense": [{"name": "dp-sgd", "noise_multiplier": 0.5}]},
    "E = 1, top 1 %": DIGITS | {"training": {"local_epochs": 1}, "defense": [{"name": "top-k", "fraction": 0.01}]},
    "digits by writer, E = 1": {
        "data": {"name": "femnist", "folder": "femnist-digits"},
        "partition": {"name": "natural", "min_examples": 50, "samples_per_client": 100},
        "training": {"local_epochs": 1},
    },
}
ATTACKS = {name: {"name": name} for name in ("label-counts", "llg", "rlu")}
METRICS = {"label_distance": "total variation", "label_cosine": "cosine"}
ADVERSARY = {"victims": list(range(VICTIMS)), "auxiliary": 300, "knowledge": {"auxiliary": True}}
WHEN: dict[str, list[int]] = {
    "first round": [1],
    "last round": [ROUNDS],
}


def tables(changes: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """An experiment without attacks."""
    found: dict[str, Any] = {
        "model": {"name": "sme-cnn", "channels": [8, 16], "hidden": 64},
        "federation": {
            "clients": 6,
            "rounds": ROUNDS,
            "seed": seed,
            "evaluate_every": ROUNDS,
            "evaluate_examples": 1000,
        },
        "adversary": {"when": "never"},
        **changes,
    }
    found["training"] = {"batch_size": 20, "learning_rate": 0.1} | changes["training"]
    if changes.get("strategy"):
        del found["training"]["learning_rate"]
    return found


def result_rows(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of results/labels.csv."""
    for place, (case, changes) in enumerate(CASES.items()):
        for seed in SEEDS:
            made = run(out / f"{place}-{seed}", tables(changes, seed))
            reached = f"{accuracy(made):.4f}"
            for when, rounds in WHEN.items():
                for row in attacked(made, ADVERSARY | {"rounds": rounds}, ATTACKS, when):
                    if row["metric"] in METRICS:
                        known = {"case": case, "rounds": when, "seed": seed, "accuracy": reached}
                        yield known | cells(row) | {"guess": row["floor_guess"]}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables: means over clients and seeds with 95 % intervals."""
    for metric, name in METRICS.items():
        values: dict[tuple[str, ...], dict[tuple[str, str], float]] = defaultdict(dict)
        for row in (row for row in rows if row["metric"] == metric):
            one = str(row["client"]), str(row["seed"])
            values[row["case"], row["rounds"], row["attack"]][one] = float(row["value"])
            values[row["case"], row["rounds"], "best guess"][one] = float(row["floor"])
        print(
            f"\n{name}\n\n| case | rounds | best guess | {' | '.join(ATTACKS)} |\n|---|---|---|{'---|' * len(ATTACKS)}"
        )
        for case in CASES:
            for when in WHEN:
                cells = [format_mean(values[case, when, attack]) for attack in ("best guess", *ATTACKS)]
                print(f"| {case} | {when} | {' | '.join(cells)} |")
    print()
    for case in CASES:
        known = {row["seed"]: row["accuracy"] for row in rows if row["case"] == case}
        print(f"{case}: right on {', '.join(known.values())} of the test examples after round {ROUNDS}")


def main() -> None:
    """Measure, write and print."""
    given = arguments(__doc__)
    keep(result_rows(given.out), RESULTS, COLUMNS, show)


if __name__ == "__main__":
    main()
