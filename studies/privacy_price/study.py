"""Accuracy under mechanisms that promise the same epsilon, and what canaries find of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

import fedsim
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_ledger
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_trade_off
from fedsim.privacy.mechanism_columns import read_mechanism
from studies.running import Row, final_accuracy
from studies.writing import format_mean, markdown_table, select_rows

DELTA = 1e-3
CANARIES = 2000
SERVER: dict[str, dict[str, str]] = {
    "fixed": {"sampling": "fixed"},
    "poisson": {"sampling": "poisson"},
    "cyclic": {"sampling": "cyclic"},
    "tree": {"sampling": "cyclic", "noise": "tree"},
    "banded": {"sampling": "cyclic", "noise": "banded"},
}
"""Settings of a trusted server's noise."""
TITLES = {
    "none": "no noise",
    "example": "`dp-sgd`, each client alone",
    "distributed": "`distributed_privacy`, Skellam shares",
    "fixed": "`central_privacy`, 50 clients at random",
    "poisson": "`central_privacy`, Poisson sampling",
    "cyclic": "`central_privacy`, in turns",
    "tree": "`central_privacy`, in turns, tree",
    "banded": "`central_privacy`, in turns, banded",
}


def describe_experiment(mechanism: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the tables of one federation; clips and rates were chosen on another seed."""
    tables: dict[str, Any] = {
        "data": {"name": "mnist"},
        "partition": {"name": "natural"},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"local_epochs": 1, "batch_size": 20, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 500, "rounds": 20, "seed": seed, "evaluate_every": 20},
        "strategy": {"name": "fedavg", "fraction_train": 0.1, "min_train_nodes": 1, "min_available_nodes": 1},
        "adversary": {"when": "never"},
        "recording": {"rounds": []},
    }
    budget = {"epsilon": epsilon, "delta": DELTA}
    if mechanism == "example":
        tables["training"] |= {"batch_size": 40, "learning_rate": 0.5}
        tables["defense"] = [{"name": "dp-sgd", **budget}]
    elif mechanism == "distributed":
        tables["secure_aggregation"] = {"groups": "all", "threshold": 0.8, "bits": 18}
        tables["distributed_privacy"] = {"clip": 0.25, **budget}
    elif mechanism in SERVER:
        tables["central_privacy"] = {"clip": 0.5, **budget, **SERVER[mechanism]}
    return tables


def measure(mechanism: str, epsilon: float, seed: int) -> Row:
    """Run a federation; of seed 0 also one with canaries, where the mechanism can have them."""
    tables = describe_experiment(mechanism, epsilon, seed)
    row: Row = {"accuracy": np.nan, "proved": "", "measured": "", "right": "", "guesses": "", "ceiling": ""}
    with tempfile.TemporaryDirectory() as folder:
        row["accuracy"] = final_accuracy(fedsim.run(tables, out=Path(folder) / "plain"))
        if seed == 0 and mechanism not in ("none", "distributed"):
            canaries = {"count": CANARIES} | ({"clients": [0]} if mechanism == "example" else {})
            if mechanism == "example":  # the client with canaries is asked in each round, as accounted for
                tables["strategy"] |= {"fraction_train": 1.0}
                tables["federation"] |= {"clients": 10}
            carried = fedsim.run(tables | {"canaries": canaries, "recording": {}}, out=Path(folder) / "canaries")
            (found,) = carried.epsilons.to_dict("records")
            row |= {name: found[name] for name in ("proved", "measured", "right", "guesses")}
            of_round = read_mechanism(read_ledger(OpenRun(carried.path))[0])
            assert of_round is not None
            passed = replace(of_round, releases=of_round.releases * found["rounds"])
            row["ceiling"] = bound_right_share(passed, found["guesses"] / CANARIES / 2)
    return row


def bound_right_share(mechanism: Mechanism, share: float) -> float:
    """Return the largest expected share of right guesses, where so many canaries are said to be in, and as many out."""
    curve = compute_trade_off([mechanism], replaced=False)
    assert curve is not None
    missed: float = brentq(lambda rate: float(curve.true_positive_rate(rate)) + rate - 2 * share, 0.0, share)
    return 1 - missed / (2 * share)


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: accuracy at each epsilon, and what canaries found."""
    lines = []
    for mechanism, title in TITLES.items():
        line = [title]
        for epsilon in ("2.0", "8.0", "20.0"):
            wanted = "0.0" if mechanism == "none" else epsilon
            chosen = select_rows(rows, mechanism=mechanism, epsilon=wanted)
            shares = {("", row["seed"]): float(row["accuracy"]) for row in chosen}
            found = next((row for row in chosen if row["measured"]), None)
            measured, guesses = "", ""
            if found is not None:
                share = float(found["right"]) / float(found["guesses"])
                measured, guesses = (
                    f"{float(found['measured']):.2f}",
                    f"{100 * share:.0f} % of {100 * float(found['ceiling']):.0f} %",
                )
            line += [format_mean(shares), measured, guesses]
        lines.append(line)
    head = ["mechanism"]
    for epsilon in ("2", "8", "20"):
        head += [f"accuracy, epsilon {epsilon}", "measured", "right guesses, at most"]
    return {"": markdown_table(head, lines)}
