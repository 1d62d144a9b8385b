"""Membership attacks beside one another, without and with DP-SGD, as in docs/membership.md.

    python benchmarks/membership_study.py --data-dir DIR --out runs/membership
    python benchmarks/membership_study.py --data-dir DIR --out runs/membership --speed
    python benchmarks/membership_study.py --data-dir DIR --out runs/membership --low

CIFAR-100 shared out among clients, a small CNN; in each run some clients are attacked. An attack that learns from
known records is granted 100 of the 300 candidates that the others have, and scored on the 200 that are left. Writes
results/membership.csv, one row a client and metric, and prints the table. Runs that are there already are read again.
With --speed it prints how long each attack on one client takes: 1000 candidates, 50 rounds. With --low it prints all
metrics, the TPR at a FPR of 0.1 % among them, of clients of 1000 images each: five clients, E = 5, one seed; where 400
of the 2000 candidates are known, those left are too few for that rate.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attack_study import accuracy, arguments, attacked, cells, keep, run

import fedsim
from fedsim.audit.evaluation.statistics import format_mean
from fedsim.interfaces.knowledge import HELD_OUT, NON_MEMBER_SOURCES

RESULTS = Path(__file__).parent / "results" / "membership.csv"
COLUMNS = ("case", "others", "attack", "metric", "seed", "client", "value", "floor", "accuracy")
SEEDS = (0, 1, 2)
CLIENTS, VICTIMS, EXAMPLES, EVERY = 8, 3, 150, 5
CASES: dict[str, dict[str, Any]] = {
    "E = 1": {"training.local_epochs": 1},
    "E = 5": {"training.local_epochs": 5, "federation.rounds": 10},
    "E = 1, DP-SGD": {"training.local_epochs": 1, "defense": [{"name": "dp-sgd", "noise_multiplier": 0.5}]},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "membership-loss": {"name": "membership-loss"},
    "membership-cosine": {"name": "membership-cosine"},
    "membership-difference": {"name": "membership-difference"},
    "fedmia, loss": {"name": "fedmia", "measure": "loss"},
    "fedmia, cosine": {"name": "fedmia"},
    "membership-lira": {"name": "membership-lira"},
}
LEARNT: dict[str, dict[str, Any]] = {"membership-white-box": {"name": "membership-white-box"}}
"""Attacks that learn from known records, which are left out of their candidates, and of theirs alone."""
METRICS = {"membership_auc": "AUC", "membership_accuracy": "balanced accuracy", "tpr_at_1_in_100": "TPR at 1 %"}
ALL_METRICS = METRICS | {"tpr_at_1_in_1000": "TPR at 0.1 %"}
KNOWN = 100
MANY, KNOWN_OF_MANY = 1000, 400


def tables(changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """An experiment without attacks."""
    found: dict[str, Any] = {
        "data": {"name": "cifar100"},
        "partition": {"name": "iid", "samples_per_client": EXAMPLES},
        "model": {"name": "sme-cnn", "channels": [8, 16], "hidden": 64},
        "training": {"local_epochs": 1, "batch_size": 10, "learning_rate": 0.1},
        "federation": {
            "clients": CLIENTS,
            "rounds": 20,
            "seed": seed,
            "evaluate_every": 100,
            "evaluate_examples": 1000,
        },
        "adversary": {"when": "never"},
    }
    for key, value in changes.items():
        table, _, name = key.partition(".")
        if name:
            found[table][name] = value
        else:
            found[table] = value
    return found


def scored(
    made: fedsim.Run, others: str, *, examples: int = EXAMPLES, known: int = KNOWN, metrics: Collection[str] = METRICS
) -> Iterator[dict[str, Any]]:
    """The scores of all attacks on the first clients, of `examples` each, in every fifth round."""
    for attacks, grant in (ATTACKS, {}), (LEARNT, {"known_candidates": known}):
        adversary = {
            "victims": list(range(VICTIMS)),
            "rounds": [number for number in made.transcript.rounds if number % EVERY == 0],
            "candidates": 2 * examples,
            "knowledge": {"candidates": others, **grant},
        }
        for row in attacked(made, adversary, attacks, others):
            if row["attack"] in attacks and row["metric"] in metrics:
                yield row


def result_rows(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of results/membership.csv."""
    for place, (case, changes) in enumerate(CASES.items()):
        for seed in SEEDS:
            made = run(out / f"{place}-{seed}", tables(changes, seed))
            reached = f"{accuracy(made):.4f}"
            for others in NON_MEMBER_SOURCES:
                for row in scored(made, others):
                    yield {"case": case, "others": others, "seed": seed, "accuracy": reached, **cells(row)}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table: means over clients and seeds with 95 % intervals."""
    values: dict[tuple[str, ...], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        key = row["case"], row["others"], row["attack"], row["metric"]
        values[key][str(row["client"]), str(row["seed"])] = float(row["value"])
    for case in CASES:
        known = {row["seed"]: float(row["accuracy"]) for row in rows if row["case"] == case}
        print(f"\n{case}: the global model is right on {fmean(known.values()):.1%} of the test images\n")
        print(
            "| attack | "
            f"{' | '.join(f'{name}, {others}' for others in NON_MEMBER_SOURCES for name in METRICS.values())} |"
        )
        print(f"|---|{'---|' * len(NON_MEMBER_SOURCES) * len(METRICS)}")
        floors = {row["metric"]: float(row["floor"]) for row in rows if row["attack"] in ATTACKS}
        print(f"| chance | {' | '.join(f'{floors[metric]:.3f}' for _ in NON_MEMBER_SOURCES for metric in METRICS)} |")
        for attack in (*ATTACKS, *LEARNT):
            texts = [
                format_mean(values[case, others, attack, metric]) for others in NON_MEMBER_SOURCES for metric in METRICS
            ]
            print(f"| {attack} | {' | '.join(texts)} |")


def speed(out: Path) -> None:
    """Print how long each attack takes on one client."""
    changes = {
        "partition.samples_per_client": 600,
        "model.channels": [16, 32],
        "federation.clients": 5,
        "federation.rounds": 50,
    }
    made = run(out / "speed", tables(changes, 0))
    for title, table in (ATTACKS | LEARNT).items():
        settings = {name: value for name, value in table.items() if name != "name"}
        knowledge = {"candidates": HELD_OUT} | ({"known_candidates": KNOWN} if title in LEARNT else {})
        start, own = time.monotonic(), time.process_time()
        made.attack(table["name"], victim=0, round=range(1, 51), knowledge=knowledge, **settings)
        print(f"{title}: {time.process_time() - own:.0f} s of CPU, {time.monotonic() - start:.0f} s", flush=True)


def low(out: Path) -> None:
    """Print all metrics of clients that hold enough for a FPR of 0.1 %; intervals over clients."""
    changes = {"partition.samples_per_client": MANY, "federation.clients": 5, **CASES["E = 5"]}
    made = run(out / "low", tables(changes, 0))
    values: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in scored(made, HELD_OUT, examples=MANY, known=KNOWN_OF_MANY, metrics=ALL_METRICS):
        attack = row["attack"]
        for name in (attack, *["chance"] * (attack in ATTACKS)):
            values[name, row["metric"]][str(row["victim"]), "0"] = row["floor" if name == "chance" else "value"]
    print(f"right on {accuracy(made):.1%}\n\n| attack | {' | '.join(ALL_METRICS.values())} |")
    print(f"|---|{'---|' * len(ALL_METRICS)}")
    for attack in ("chance", *ATTACKS, *LEARNT):
        found = [values[attack, metric] for metric in ALL_METRICS]
        texts = ["-" if any(map(math.isnan, own.values())) else format_mean(own) for own in found]
        print(f"| {attack} | {' | '.join(texts)} |")


def main() -> None:
    """Measure, write and print; or only time."""
    given = arguments(__doc__, "--speed", "--low")
    if given.speed:
        speed(given.out)
    elif given.low:
        low(given.out)
    else:
        keep(result_rows(given.out), RESULTS, COLUMNS, show)


if __name__ == "__main__":
    main()
