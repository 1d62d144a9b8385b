"""Property inference on Adult, as in docs/labels-and-properties.md: do women's records stand behind a message?

    python benchmarks/properties_study.py --data-dir DIR --out runs/properties

Eight clients with as many records and the same income, of whom four hold women in a larger share than the other four;
sex is a column that the model is fed with, or is left out of it. Two clients of either kind are attacked, each compared
with all others. Writes results/properties.csv, one row a client, attack and metric, and prints the tables. Runs that
are there already are read again.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from attack_study import accuracy, arguments, attacked, cells, keep, run

import fedsim
from fedsim.audit.evaluation.statistics import format_mean
from fedsim.data import Dataset
from fedsim.data.tables import Csv

RESULTS = Path(__file__).parent / "results" / "properties.csv"
COLUMNS = ("case", "rounds", "attack", "metric", "seed", "client", "value", "floor", "accuracy")
SEEDS = (0, 1, 2)
CLIENTS, VICTIMS, EXAMPLES, RICH = 8, 4, 64, 16
FED, LEFT_OUT = "sex=Female", "group=Female"
"""The property where sex is a column, and where it says whose a record is, which the model is not fed with."""
HALF, FEW = (0.0, 0.5), (0.1, 0.3)
"""Shares of women."""
GRADIENT: dict[str, Any] = {
    "training": {"local_steps": 1, "batch_size": EXAMPLES // 2},
    "strategy": {"name": "fedsgd", "learning_rate": 0.2},
}
EPOCH: dict[str, Any] = {"training": {"local_epochs": 1, "batch_size": 16, "learning_rate": 0.1}}
PRIVATE = EPOCH | {"defense": [{"name": "dp-sgd", "noise_multiplier": 0.5}]}
CASES: dict[str, tuple[str, tuple[float, float], dict[str, Any]]] = {
    "one gradient, sex is fed": (FED, HALF, GRADIENT),
    "one gradient": (LEFT_OUT, HALF, GRADIENT),
    "E = 1, sex is fed": (FED, HALF, EPOCH),
    "E = 1": (LEFT_OUT, HALF, EPOCH),
    "E = 1, sex is fed, 30 or 10 %": (FED, FEW, EPOCH),
    "E = 1, 30 or 10 %": (LEFT_OUT, FEW, EPOCH),
    "E = 1, sex is fed, DP-SGD": (FED, HALF, PRIVATE),
}
SHORT, LONG = 10, 60
WHEN: dict[int, dict[str, list[int]]] = {
    SHORT: {"round 1": [1], "rounds 4, 7, 10": [4, 7, SHORT]},
    LONG: {"round 60": [LONG]},
}
"""By how many rounds a federation has."""
LONGER = ("E = 1, sex is fed", "E = 1", "E = 1, 30 or 10 %")
"""Cases that are run for LONG rounds, too."""
SHOWN = [when for known in WHEN.values() for when in known]
METRICS = {
    "property_auc": "AUC of messages",
    "property_accuracy": "accuracy of messages",
    "property_client_auc": "AUC of clients",
    "property_client_accuracy": "accuracy of clients",
}


def table(source: Path, path: Path) -> Path:
    """Adult's two files in one, with a first line that names the columns; people of whom something is unknown left out.

    Args:
        source: folder of adult.data and adult.test.
    """
    names = (
        *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
        *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
    )
    lines = (line for name in ("adult.data", "adult.test") for line in (source / name).read_text().splitlines())
    rows = [line.rstrip(".").split(", ") for line in lines if line and line[0] != "|" and "?" not in line]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def data(path: Path, kind: str) -> dict[str, Any]:
    """The settings of the data set; whose husband or wife somebody is would tell the sex."""
    group = {"group": "sex"} if kind == LEFT_OUT else {}
    return {"path": str(path), "target": "income", "drop": ("fnlwgt", "education-num", "relationship"), **group}


def shared_out(dataset: Dataset, kind: str, shares: tuple[float, float], seed: int, path: Path) -> Path:
    """A file of who holds what: clients in turn with the smaller and the larger share of women, each with RICH rich."""
    train, rng = dataset.train, np.random.default_rng(seed)
    if kind == LEFT_OUT:
        assert train.groups is not None
        female = train.groups.numpy() == dataset.group_names.index("Female")
    else:
        female = dataset.column("sex").values(train.inputs()).numpy() == 0
    cells = {
        (rich, woman): list(rng.permutation(np.flatnonzero((train.labels.numpy() == rich) & (female == woman))))
        for rich in (0, 1)
        for woman in (False, True)
    }
    held: dict[str, list[int]] = {}
    for client in range(CLIENTS):
        own = held[str(client)] = []
        for rich, count in enumerate((EXAMPLES - RICH, RICH)):
            women = round(shares[client % 2] * count)
            for woman, many in ((True, women), (False, count - women)):
                own += [int(cells[rich, woman].pop()) for _ in range(many)]
    path.write_text(json.dumps(held))
    return path


def result_rows(source: Path, out: Path) -> Iterator[dict[str, Any]]:
    """The rows of results/properties.csv."""
    path = table(source, out.resolve() / "adult.csv")
    for place, (case, (kind, shares, changes)) in enumerate(CASES.items()):
        settings = data(path, kind)
        dataset = Csv(**settings).load(None)
        for seed in SEEDS:
            index = shared_out(dataset, kind, shares, seed, out.resolve() / f"{place}-{seed}.json")
            for rounds in (SHORT, LONG) if case in LONGER else (SHORT,):
                experiment = {
                    "data": {"name": "csv", **settings, "drop": list(settings["drop"])},
                    "partition": {"name": "index-file", "path": str(index)},
                    "model": {"name": "mlp", "hidden": [64, 64]},
                    "federation": {"clients": CLIENTS, "rounds": rounds, "seed": seed, "evaluate_every": rounds},
                    "adversary": {"when": "never"},
                    **changes,
                }
                made = run(out / f"{place}-{seed}{'-long' * (rounds == LONG)}", experiment)
                reached = f"{accuracy(made):.4f}"
                for row in scores(made, kind, shares, "defense" in changes, WHEN[rounds]):
                    yield {"case": case, "seed": seed, "accuracy": reached, **row}


def scores(
    made: fedsim.Run, kind: str, shares: tuple[float, float], defended: bool, when: Mapping[str, list[int]]
) -> Iterator[dict[str, Any]]:
    """Of all attacks on the first clients."""
    attack = {"name": "property-inference", "absent": shares[0], "present": shares[1]}
    knows = {"property_records": kind, "defenses": defended}
    for title, rounds in when.items():
        adversary = {"victims": list(range(VICTIMS)), "rounds": rounds, "auxiliary": 5000, "knowledge": knows}
        for row in attacked(made, adversary, {"property-inference": attack}, title):
            yield {"rounds": title, **cells(row)}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table: means over clients and seeds with 95 % intervals; the floor is 0.5 throughout."""
    values: dict[tuple[str, ...], dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        key = row["case"], row["attack"], row["rounds"], row["metric"]
        values[key][str(row["client"]), str(row["seed"])] = float(row["value"])
    made = list(dict.fromkeys((row["case"], row["attack"]) for row in rows))
    for metric, name in METRICS.items():
        print(f"\n{name}\n\n| case | attack | {' | '.join(SHOWN)} |\n|---|---|{'---|' * len(SHOWN)}")
        for case, attack in made:
            known = [values[case, attack, when, metric] for when in SHOWN]
            print(f"| {case} | {attack} | {' | '.join(format_mean(own) if own else '' for own in known)} |")
    print()
    for case in CASES:
        for length, when in WHEN.items():
            own = [row for row in rows if row["case"] == case and row["rounds"] in when]
            right = {row["seed"]: float(row["accuracy"]) for row in own}
            if right:
                print(f"{case}: right on {fmean(right.values()):.1%} of the test records after round {length}")


def main() -> None:
    """Measure, write and print."""
    given = arguments(__doc__)
    keep(result_rows(Path(given.data_dir) / "adult", given.out), RESULTS, COLUMNS, show)


if __name__ == "__main__":
    main()
