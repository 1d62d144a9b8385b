"""LMRA's attacks where one setting of a federation differs; the tables of docs/studies/papers/lmra.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.lmra.study import LABELS, read_experiment
from studies.lmra_models.study import (
    Cell,
    attack_clients,
    format_difference,
    format_number,
    format_score,
    list_attacks,
    split_federations,
)
from studies.running import RUNS, Row, Study, read_rows
from studies.writing import group_rows, markdown_table, select_rows

ATTACKED = 10
SMALL_BATCH = 256
"""Batch size where clients have few examples."""
TITLES = {
    ("examples", "64"): "64 examples",
    ("examples", "256"): "256 examples",
    ("examples", "1024"): "1024 examples",
    ("batch_size", "8"): "B = 8",
    ("batch_size", "64"): "B = 64",
    ("batch_size", "full"): "B = N",
    ("local_epochs", "10"): "E = 10",
    ("clients", "40"): "40 clients",
    ("clients", "100"): "100 clients",
}
"""Settings and values in the order of the tables."""
BASE = "base setting"
BASES = {"40 clients": "256 examples", "100 clients": "256 examples"}
"""What a line is compared with, if not with the base setting; nothing where a federation lacks it, as AT&T does."""
Column = tuple[str, str, str, str]
"""Its title; an attack, its metric, and what to show: its score, its floor, or the name of what is subtracted."""
COLUMNS: dict[str, list[Column]] = {
    "local": [
        ("distance: floor", "last-returned", "parameter_distance", "its floor"),
        ("last-returned", "last-returned", "parameter_distance", ""),
        ("dummy data", "lmra-dummy-data", "parameter_distance", ""),
        ("dummy data minus floor", "lmra-dummy-data", "parameter_distance", "floor"),
        ("Zest: floor", "last-returned", "zest", "its floor"),
        ("last-returned", "last-returned", "zest", ""),
        ("dummy data", "lmra-dummy-data", "zest", ""),
        ("dummy data minus floor", "lmra-dummy-data", "zest", "floor"),
    ],
    "attributes": [
        ("floor", "aia-gradient", "attribute_accuracy", "its floor"),
        ("gradient", "aia-gradient", "attribute_accuracy", ""),
        ("gradient minus base", "aia-gradient", "attribute_accuracy", BASE),
        ("last-returned", "aia, last-returned", "attribute_accuracy", ""),
        ("dummy data", "aia, dummy data", "attribute_accuracy", ""),
        ("dummy data minus base", "aia, dummy data", "attribute_accuracy", BASE),
        ("optimal", "aia, optimal", "attribute_accuracy", ""),
        ("dummy data minus gradient", "aia, dummy data", "attribute_accuracy", "aia-gradient"),
    ],
    "sources": [
        ("floor", "sia, last-returned, each", "source_accuracy", "its floor"),
        ("each record: last-returned", "sia, last-returned, each", "source_accuracy", ""),
        ("dummy data", "sia, dummy data, each", "source_accuracy", ""),
        ("optimal", "sia, optimal, each", "source_accuracy", ""),
        ("client's set: last-returned", "sia, last-returned, together", "source_accuracy", ""),
        ("dummy data", "sia, dummy data, together", "source_accuracy", ""),
        ("optimal", "sia, optimal, together", "source_accuracy", ""),
    ],
    "images": [
        ("SSIM: floor", "sra-gradient", "class_ssim", "its floor"),
        ("gradient", "sra-gradient", "class_ssim", ""),
        ("gradient minus base", "sra-gradient", "class_ssim", BASE),
        ("last-returned", "sra, last-returned", "class_ssim", ""),
        ("dummy data", "sra, dummy data", "class_ssim", ""),
        ("dummy data minus gradient", "sra, dummy data", "class_ssim", "sra-gradient"),
        ("PSNR, dB: gradient", "sra-gradient", "class_psnr", ""),
        ("last-returned", "sra, last-returned", "class_psnr", ""),
        ("dummy data", "sra, dummy data", "class_psnr", ""),
    ],
}
"""Columns of each table of the page; differences are of pairs of the same client."""
Rows = Sequence[Mapping[str, str]]


def change_setting(data: str, setting: str, value: int | str) -> dict[str, Any]:
    """Return the experiment of the paper's Table 1 with one setting changed.

    With more local epochs there are fewer rounds and all are recorded, so training and messages stay as many. More
    clients than ten of Leaf Synthetic have 256 examples each.
    """
    tables = read_experiment(data)
    partition, training, federation = tables["partition"], tables["training"], tables["federation"]
    if setting == "examples":
        partition["samples_per_client"], training["batch_size"] = value, SMALL_BATCH
    elif setting == "batch_size":
        training["batch_size"] = 4096 if value == "full" else value
    elif setting == "local_epochs":
        training["local_epochs"], federation["rounds"] = value, federation["rounds"] // int(value)
        tables["recording"]["every"] = 1
    else:
        federation["clients"] = value
        if data == "leaf-synthetic":
            tables["data"]["clients"] = value
            partition["samples_per_client"], training["batch_size"] = SMALL_BATCH, SMALL_BATCH
    return tables


def measure(data: str, setting: str, setting_value: int | str) -> list[Row]:
    """Return the scores of the attacks of the tables on the first ten clients of one federation."""
    experiment = change_setting(data, setting, setting_value)
    has_others = int(experiment["federation"]["clients"]) > ATTACKED
    hidden = ["global", "returned", "lmra"]
    # Sources are inferred among the clients whose models are decoded, which have to be all.
    hidden_of_sources = [*hidden, "lmra-dummy-data", "optimal"] if has_others else hidden
    experiment["attack"] = []
    for attack in list_attacks(data):
        is_hidden = attack["name"] == "lmra" or attack.get("source") in (
            hidden_of_sources if attack["name"] == "sia" else hidden
        )
        if not is_hidden:
            experiment["attack"].append(attack)
    victims = list(range(ATTACKED)) if has_others else "all"
    return attack_clients(experiment, data, victims, RUNS / "lmra_sweeps" / f"{data}-{setting}-{setting_value}")


def tables(rows: Rows) -> dict[str, str]:
    """Return the tables of the page, with a line for each federation and setting."""
    cells = group_rows(rows, "data", "setting", "setting_value")
    kept = select_rows(read_rows(Study.open("lmra_models").results), seed=1, batch_norm=False)
    federations: dict[str, dict[str, Cell]] = {}
    for title, base in split_federations(kept).items():
        (data,) = [data for data, label in LABELS.items() if label == title]
        federations[title] = {BASE: base}
        for place, setting in TITLES.items():
            if (data, *place) in cells:
                seeded = [{"seed": "1", **row} for row in cells[data, *place]]
                federations[title][setting] = group_rows(seeded, "attack", "metric")
    return {name: setting_table(federations, columns) for name, columns in COLUMNS.items()}


def setting_table(federations: Mapping[str, Mapping[str, Cell]], columns: Sequence[Column], base: str = BASE) -> str:
    """Return a table with a line for each setting of each federation that has scores.

    Args:
        federations: by title, and by setting.
        base: the setting with which others are compared, but for those in `BASES`.
    """
    lines = []
    for title, settings in federations.items():
        about = title
        for setting, cell in settings.items():
            texts = format_columns(cell, settings.get(BASES.get(setting, base), {}), columns)
            if any(texts):
                lines.append([about, setting, *texts])
                about = ""
    return markdown_table(["", "", *(column for column, *_ in columns)], lines)


def format_columns(cell: Cell, base: Cell, columns: Sequence[Column]) -> list[str]:
    """Return what columns show of one federation, given the one that it is compared with."""
    texts = []
    for _, attack, metric, shown in columns:
        if shown == "its floor":
            floors = [float(row["floor"]) for row in cell.get((attack, metric), ())]
            text = format_number(float(np.mean(floors)), metric) if floors else ""
        elif shown == BASE:
            both = {**cell, (BASE, metric): base.get((attack, metric), [])}
            text = "" if cell is base else format_difference(both, attack, BASE, metric)
        elif shown:
            text = format_difference(cell, attack, shown, metric)
        else:
            text = format_score(cell, attack, metric)
        texts.append(text)
    return texts
