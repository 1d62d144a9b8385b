"""LMRA's attacks on clients that defend themselves; the tables of docs/studies/papers/lmra.md."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedsim
from studies.lmra.study import LABELS, read_experiment
from studies.lmra_models.study import (
    Cell,
    Rows,
    attack_clients,
    format_mean,
    format_percent,
    list_attacks,
)
from studies.lmra_sweeps.study import BASE, Column, setting_table
from studies.running import RUNS, Row, Study, final_accuracy, read_rows
from studies.writing import column_values, group_rows, kept_result

MIXUP = {"name": "mixup"}
DP = {"name": "dp-sgd", "epsilon": 10.0, "delta": 1e-5}
DEFENSES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "DP": [DP],
    "mixup": [MIXUP],
    "DP + mixup": [MIXUP, {**DP, "with_mixing": True}],
}
COMMAND = "python -m studies lmra_defenses  # two to fifteen minutes of one core for each federation and defense"
NOTE = "All clients, with the floors and intervals of our own tables."
UNDEFENDED = "no defense"
COLUMNS: dict[str, list[Column]] = {
    "local": [
        ("Zest: floor", "last-returned", "zest", "its floor"),
        ("global", "global", "zest", ""),
        ("global minus no defense", "global", "zest", BASE),
        ("lmra", "lmra", "zest", ""),
        ("lmra minus floor", "lmra", "zest", "floor"),
        ("dummy data", "lmra-dummy-data", "zest", ""),
        ("dummy data minus floor", "lmra-dummy-data", "zest", "floor"),
        ("dummy data minus no defense", "lmra-dummy-data", "zest", BASE),
        ("other start: dummy data minus floor", "lmra-dummy-data", "zest_other_start", "floor"),
        ("distance: dummy data minus floor", "lmra-dummy-data", "parameter_distance", "floor"),
    ],
    "attributes": [
        ("floor", "aia-gradient", "attribute_accuracy", "its floor"),
        ("gradient", "aia-gradient", "attribute_accuracy", ""),
        ("gradient minus floor", "aia-gradient", "attribute_accuracy", "floor"),
        ("gradient minus no defense", "aia-gradient", "attribute_accuracy", BASE),
        ("lmra", "aia, lmra", "attribute_accuracy", ""),
        ("dummy data", "aia, dummy data", "attribute_accuracy", ""),
        ("dummy data minus no defense", "aia, dummy data", "attribute_accuracy", BASE),
        ("dummy data minus gradient", "aia, dummy data", "attribute_accuracy", "aia-gradient"),
        ("optimal", "aia, optimal", "attribute_accuracy", ""),
    ],
    "sources": [
        ("floor", "sia, returned, each", "source_accuracy", "its floor"),
        ("each record: majority over rounds", "sia, returned, each", "source_accuracy", ""),
        ("majority minus no defense", "sia, returned, each", "source_accuracy", BASE),
        ("lmra", "sia, lmra, each", "source_accuracy", ""),
        ("dummy data", "sia, dummy data, each", "source_accuracy", ""),
        ("optimal", "sia, optimal, each", "source_accuracy", ""),
        ("client's set: majority over rounds", "sia, returned, together", "source_accuracy", ""),
        ("last-returned", "sia, last-returned, together", "source_accuracy", ""),
        ("last-returned minus no defense", "sia, last-returned, together", "source_accuracy", BASE),
        ("lmra", "sia, lmra, together", "source_accuracy", ""),
        ("dummy data", "sia, dummy data, together", "source_accuracy", ""),
        ("optimal", "sia, optimal, together", "source_accuracy", ""),
    ],
    "images": [
        ("SSIM: floor", "sra-gradient", "class_ssim", "its floor"),
        ("gradient", "sra-gradient", "class_ssim", ""),
        ("gradient minus no defense", "sra-gradient", "class_ssim", BASE),
        ("lmra", "sra, lmra", "class_ssim", ""),
        ("dummy data", "sra, dummy data", "class_ssim", ""),
        ("dummy data minus no defense", "sra, dummy data", "class_ssim", BASE),
        ("dummy data minus gradient", "sra, dummy data", "class_ssim", "sra-gradient"),
        ("optimal", "sra, optimal", "class_ssim", ""),
    ],
}
"""Columns of each table of the page, see `studies.lmra_sweeps`."""
FIGURES = {
    "lmra": {
        "zest-ours": ("lmra", "zest"),
        "zest-global": ("global", "zest"),
        "aia-ours": ("aia, lmra", "attribute_accuracy"),
        "aia-baseline": ("aia-gradient", "attribute_accuracy"),
        "sia-ours": ("sia, lmra, each", "source_accuracy"),
        "sia-baseline": ("sia, returned, each", "source_accuracy"),
        "sra-ours": ("sra, lmra", "class_ssim"),
        "sra-baseline": ("sra-gradient", "class_ssim"),
    },
    "lmra, client's set": {
        "sia-ours": ("sia, lmra, together", "source_accuracy"),
        "sia-baseline": ("sia, returned, together", "source_accuracy"),
    },
    "lmra-dummy-data": {
        "zest-ours": ("lmra-dummy-data", "zest"),
        "aia-ours": ("aia, dummy data", "attribute_accuracy"),
        "sia-ours": ("sia, dummy data, each", "source_accuracy"),
        "sra-ours": ("sra, dummy data", "class_ssim"),
    },
    "lmra-dummy-data, client's set": {"sia-ours": ("sia, dummy data, together", "source_accuracy")},
    "optimal model": {
        "aia-ours": ("aia, optimal", "attribute_accuracy"),
        "sia-ours": ("sia, optimal, each", "source_accuracy"),
        "sra-ours": ("sra, optimal", "class_ssim"),
    },
}
"""The attack and its metric by quantity of the paper's table, for each of our results."""


def defend_clients(data: str, defense: str, seed: int) -> dict[str, Any]:
    """Return the experiment of the paper's Table 10, without attacks.

    But for AT&T, networks have 64 units a layer, and clients a quarter of the examples and of the batch size: a
    gradient for each example is what DP-SGD costs on a CPU.
    """
    tables = read_experiment(data)
    if data != "att-faces":
        tables["model"]["hidden"] = [64, 64, 64]
        tables["training"]["batch_size"] = 128
        tables["partition"] |= {"examples": 3075} if data == "adult" else {"samples_per_client": 500}
    tables["federation"]["seed"] = seed
    tables["defense"] = DEFENSES[defense]
    return tables


def measure(data: str, defense: str, seed: int) -> list[Row]:
    """Return the scores of every attack on every client of one federation, and its accuracy."""
    path = RUNS / "lmra_defenses" / f"{data}-{defense.replace(' ', '')}-{seed}"
    experiment = defend_clients(data, defense, seed)
    experiment["attack"] = list_attacks(data)
    rows = attack_clients(experiment, data, "all", path)
    return [*rows, {"attack": "federation", "metric": "accuracy", "value": final_accuracy(fedsim.open(path))}]


def tables(rows: Rows) -> dict[str, str]:
    """Return the tables of the page, with a line for each federation and defense."""
    federations = split_defenses(rows)
    return {name: setting_table(federations, columns, UNDEFENDED) for name, columns in COLUMNS.items()}


def split_defenses(rows: Rows) -> dict[str, dict[str, Cell]]:
    """Return the rows of attacks by the titles of federation and defense."""
    federations: dict[str, dict[str, Cell]] = {}
    for (data, defense), of_both in group_rows(rows, "data", "defense").items():
        cell = group_rows(of_both, "attack", "metric")
        del cell["federation", "accuracy"]
        federations.setdefault(LABELS[data], {})[UNDEFENDED if defense == "none" else defense] = cell
    return federations


def figures() -> dict[str, Any]:
    """Return our figures in the place of the paper's Table 10, in percent."""
    rows, kept = read_rows(Study.open("lmra_defenses").results), []
    accuracies = group_rows([row for row in rows if row["attack"] == "federation"], "data", "defense")
    for name, attacks in FIGURES.items():
        figures_of_rows: dict[str, dict[str, str]] = {}
        for federation, defenses in split_defenses(rows).items():
            for defense, cell in defenses.items():
                texts = {}
                for quantity, (attack, metric) in attacks.items():
                    if text := format_mean(cell, attack, metric, format_percent):
                        texts[quantity] = text
                figures_of_rows[f"{federation}, {defense}"] = texts
        kept.append(kept_result("table10", name, COMMAND, figures_of_rows, NOTE))
    for (data, defense), of_both in accuracies.items():
        row = f"{LABELS[data]}, {UNDEFENDED if defense == 'none' else defense}"
        kept[0]["rows"][row]["accuracy"] = f"{100 * np.mean(column_values(of_both, 'value')):.1f}"
    return {"paper": "lmra", "kept": kept}
