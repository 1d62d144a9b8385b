"""LMRA's attacks where one setting of a federation differs; the tables of docs/studies/papers/lmra.md."""

from __future__ import annotations

from typing import Any

from studies.lmra.study import read_experiment
from studies.lmra_models.study import attack_clients, list_attacks
from studies.running import RUNS, Row

ATTACKED = 10
SMALL_BATCH = 256
"""Batch size where clients have few examples."""


def change_setting(data: str, setting: str, value: int | str) -> dict[str, Any]:
    """Return the experiment of the paper's Table 1 with one setting changed.

    With more local epochs there are fewer rounds and all are recorded, so training and messages stay as many. A hundred
    clients have 256 examples each.
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


def measure(data: str, setting: str, value: int | str) -> list[Row]:
    """Return the scores of the attacks of the tables on ten clients of one federation, or on all if there are fewer."""
    tables = change_setting(data, setting, value)
    attacks = []
    for attack in list_attacks(data):
        label = attack.get("label", attack["name"])
        # The paper's Algorithm 2 decodes nothing that the last-returned model has not, and the global model is no better.
        if label != "lmra" and "global" not in label and ", lmra" not in label:
            attacks.append(attack)
    tables["attack"] = attacks
    clients = int(tables["federation"]["clients"])
    victims = "all" if clients <= ATTACKED else list(range(ATTACKED))
    return attack_clients(tables, data, victims, RUNS / "lmra_sweeps" / f"{data}-{setting}-{value}")
