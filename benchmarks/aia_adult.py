"""Attribute inference on Adult beside guesses that read no message, as in docs/local-models.md.

    python benchmarks/aia_adult.py --data-dir DIR --out runs/aia-adult

Eight clients of 100 records each, drawn at random; the sensitive attribute is sex, the label whether an income is above
50 000 dollars, the model an MLP of 32 units. FedAvg with one epoch a round and with five, 50 rounds, every fifth of
which the server inspects. Writes results/aia-adult.csv, one row a client, attack and metric, and prints the tables.
Guesses are rows, too: a coin, the majority among the client's own records, and imputation from public (test) records
(Jayaraman and Evans, CCS 2022). Runs that are there already are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attack_study import accuracy, arguments, keep, run
from torch import Tensor

from fedsim.audit.evaluation.imputation import Imputation
from fedsim.audit.evaluation.statistics import format_mean
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables

RESULTS = Path(__file__).parent / "results" / "aia-adult.csv"
COLUMNS = ("case", "attack", "metric", "seed", "client", "value", "model")
SEEDS, CLIENTS, RECORDS, ATTRIBUTE = (1, 2, 3), 8, 100, "sex"
CASES = {"E = 1": 1, "E = 5": 5}
ATTACKS: list[dict[str, Any]] = [
    {"name": "aia-gradient"},
    {"name": "aia-model", "label": "aia-model, global", "source": "global"},
    {"name": "aia-model", "label": "aia-model, last-returned"},
    {"name": "aia-model", "label": "aia-model, optimal", "source": "optimal"},
]
METRICS = {"attribute_accuracy": "accuracy", "attribute_balanced_accuracy": "balanced accuracy"}
GUESSES = ("coin", "majority", "imputation")


def tables(epochs: int, seed: int) -> dict[str, Any]:
    """An experiment."""
    return {
        "data": {"name": "adult", "drop": ["fnlwgt", "education-num", "native-country"]},
        "partition": {"name": "iid", "samples_per_client": RECORDS},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"local_epochs": epochs, "batch_size": 10, "learning_rate": 0.05},
        "federation": {"clients": CLIENTS, "rounds": 50, "seed": seed, "evaluate_every": 50, "engine": "serial"},
        "recording": {"every": 5},
        "adversary": {
            "victims": "all",
            "rounds": "all",
            "workers": 1,
            "knowledge": {"partial_records": ATTRIBUTE},
        },
        "attack": ATTACKS,
    }


def guesses(seed: int, experiment: dict[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Name, metric, client and value of what is said without a message."""
    made = Experiment(validate_tables(Config, experiment, "adult"))
    column = made.dataset.column(ATTRIBUTE)
    imputation = Imputation.fit(made.dataset.test, column, seed)
    for client in range(CLIENTS):
        inputs, labels = made.data.train(client)
        truth, guess = column.values(inputs), imputation.guess(inputs, labels)
        majority = float(truth.bincount().max()) / len(truth)
        values = {
            "coin": (0.5, 0.5),
            "majority": (majority, 0.5),
            "imputation": (float((guess.likeliest == truth).double().mean()), balanced(guess.balanced, truth)),
        }
        for name, of_both in values.items():
            for metric, value in zip(METRICS, of_both, strict=True):
                yield name, metric, client, value


def balanced(guess: Tensor, truth: Tensor) -> float:
    """The mean over categories of how many of their records are right."""
    right = (guess == truth).double()
    return fmean(float(right[truth == category].mean()) for category in truth.unique())


def result_rows(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of results/aia-adult.csv."""
    for case, epochs in CASES.items():
        for seed in SEEDS:
            experiment, path = tables(epochs, seed), out / f"{epochs}-{seed}"
            made = run(path, experiment)
            row = {"case": case, "seed": seed, "model": f"{accuracy(made):.4f}"}
            for name, metric, client, value in guesses(seed, experiment):
                yield row | {"attack": name, "metric": metric, "client": client, "value": f"{value:.4f}"}
            for one in made.scores[made.scores["metric"].isin(METRICS)].to_dict("records"):
                found = {"attack": one["attack"], "metric": one["metric"], "client": one["victim"]}
                yield row | found | {"value": f"{one['value']:.4f}"}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables: means over clients and seeds with 95 % intervals, and what is paired with imputation."""
    values: dict[tuple[str, ...], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        values[row["case"], row["attack"], row["metric"]][str(row["client"]), str(row["seed"])] = float(row["value"])
    for case in CASES:
        models = {row["seed"]: float(row["model"]) for row in rows if row["case"] == case}
        print(f"\n{case}: the global model is right on {fmean(models.values()):.1%} of the test records\n")
        print("| | " + " | ".join(f"{name} | beside imputation" for name in METRICS.values()) + " |")
        print(f"|---|{'---|' * 2 * len(METRICS)}")
        for name in (*GUESSES, *(one.get("label", one["name"]) for one in ATTACKS)):
            cells = []
            for metric in METRICS:
                found, imputed = values[case, name, metric], values[case, "imputation", metric]
                cells += [format_mean(found), format_mean({key: value - imputed[key] for key, value in found.items()})]
            print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measure, write and print."""
    given = arguments(__doc__)
    keep(result_rows(given.out.resolve()), RESULTS, COLUMNS, show)


if __name__ == "__main__":
    main()
