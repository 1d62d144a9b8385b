"""All attacks of LMRA's Table 1 on all clients of a federation; the tables of docs/studies/papers/lmra.md."""

from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

import fedsim
from fedsim.base.errors import RunError
from studies.lmra.study import read_experiment
from studies.running import RUNS, Row

METRICS = {
    "parameter_distance",
    "zest",
    "zest_other_start",
    "local_accuracy",
    "local_mape",
    "attribute_accuracy",
    "attribute_balanced_accuracy",
    "source_accuracy",
    "class_ssim",
    "class_psnr",
}
SOURCES = {
    "global": "global",
    "last-returned": "last-returned",
    "lmra": "lmra",
    "dummy data": "lmra-dummy-data",
    "optimal": "optimal",
}
"""Models that attacks of inference read, by what their rows are called."""
ATTRIBUTES = {"adult": "sex", "leaf-synthetic": "sensitive", "flight-prices": "stops"}


def list_attacks(data: str) -> list[dict[str, Any]]:
    """Return the attacks on a recording: models, and what they tell of attributes or images, and of sources."""
    attacks: list[dict[str, Any]] = [
        {"name": "shared-model", "label": "global", "source": "global"},
        {"name": "shared-model", "label": "last-returned"},
        {"name": "lmra", "hidden": "32x2", "learning_rate": 1e-3, "minimise_epochs": 1000},
        {"name": "lmra-dummy-data"},
    ]
    for label, source in SOURCES.items():
        if data == "att-faces":
            attacks.append({"name": "sra-model", "label": f"sra, {label}", "source": source})
        else:
            attacks.append({"name": "aia-model", "label": f"aia, {label}", "source": source})
    attacks.append(
        {"name": "sra-gradient"} if data == "att-faces" else {"name": "aia-gradient", "rounds": 3, "iterations": 30}
    )
    for label, source in {"returned": "returned", **SOURCES}.items():
        if source != "global":  # it is the same for all clients
            for decide in ("each", "together"):
                attacks.append({"name": "sia", "label": f"sia, {label}, {decide}", "source": source, "decide": decide})
    return attacks


def refusals(path: Path) -> list[tuple[str, str]]:
    """Return the attacks that made no claim about a client, with the client."""
    if not (path / "failed.csv").exists():
        return []
    with (path / "failed.csv").open(newline="") as file:
        return [(row["attack"], row["victim"]) for row in csv.DictReader(file)]


def measure(data: str, batch_norm: bool, seed: int) -> list[Row]:
    """Return the scores of every attack on every client of one federation."""
    path = RUNS / "lmra_models" / f"{data}{'-bn' if batch_norm else ''}-{seed}"
    tables = read_experiment(data)
    tables["federation"]["seed"] = seed
    if batch_norm:
        tables["model"]["batch_norm"] = True
        tables["training"]["batch_norm_statistics"] = "withheld"
    knowledge = {"records": True} | ({"partial_records": ATTRIBUTES[data]} if data in ATTRIBUTES else {})
    tables["adversary"] = {"victims": "all", "rounds": "all", "knowledge": knowledge}
    tables["attack"] = list_attacks(data)
    if not (path / "scores.csv").exists():
        with suppress(RunError):  # attacks that refuse, which have rows below
            fedsim.run(tables, out=path)
    run = fedsim.open(path)
    rows: list[Row] = [{"attack": label, "victim": client, "metric": "refused"} for label, client in refusals(path)]
    for score in run.scores.to_dict("records"):
        if score["metric"] in METRICS:
            rows.append({name: score[name] for name in ("attack", "victim", "metric", "value", "floor")})
    return rows
