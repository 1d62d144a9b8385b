"""Federations of clients with three letters each, as in Collins et al. 2021, and how accurate their models are.

The published figures are of the last column of Table 1, FEMNIST with 150 clients of three classes. What the paper does
not say is as in its authors' code (lgcollins/FedRep at d82e629): the network, whose softmax stands before the
cross-entropy, which takes one more; the classes of a client; and lambda of Ditto.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedsim
from fedsim.base.task import Task
from fedsim.data import Dataset
from fedsim.data.idx import Emnist
from fedsim.data.partitions import Indices
from fedsim.training.models.mlp import Mlp
from studies.running import Row
from studies.writing import column_values, markdown_table, select_rows

CLIENTS, CLASSES_OF_A_CLIENT, LETTERS = 50, 3, 10
AVERAGED_ROUNDS = 10
PUBLISHED = {"fedavg": 51.64, "fedper": 76.91, "fedrep": 78.56, "ditto": 68.28}
"""Accuracies in percent, [Collins2021], Table 1, FEMNIST (150, 3)."""
TITLES = {
    "alone": "each client alone: `ditto`, lambda = 1e-9", "fedavg": "`fedavg`", "ditto": "`ditto`, lambda = 1",
    "fedper": "`fedper`", "fedrep": "`fedrep`",
}  # fmt: skip
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedper": {"name": "fedper"},
    "fedrep": {"name": "fedrep", "head_epochs": 10},
    "ditto": {"name": "ditto", "weight": 1.0},
    "alone": {"name": "ditto", "weight": 1e-9},  # a client's own model is drawn to no other
}


@dataclass(frozen=True, kw_only=True)
class FirstLetters:
    """The letters a to j of EMNIST's test file, 800 of each; all are training examples."""

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        letters = Emnist(split="letters", files="test").load(folder)
        raw = torch.cat([letters.train.raw, letters.test.raw])
        labels = torch.cat([letters.train.labels, letters.test.labels])
        kept = labels < LETTERS
        return replace(
            letters,
            train=replace(letters.train, raw=raw[kept], labels=labels[kept], groups=None),
            test=replace(letters.test, raw=raw[kept][::10], labels=labels[kept][::10], groups=None),
            num_classes=LETTERS,
            class_names=letters.class_names[:LETTERS],
        )


@dataclass(frozen=True, kw_only=True)
class NeighbouringClasses:
    """Client i holds equal shares of the classes i, i + 1 and i + 2, modulo their number."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`."""
        labels = dataset.train.labels.numpy()
        shares: list[list[Indices]] = [[] for _ in range(clients)]
        for label in range(dataset.num_classes):
            holders = [i for i in range(clients) if (label - i) % dataset.num_classes < CLASSES_OF_A_CLIENT]
            members = rng.permutation(np.flatnonzero(labels == label))
            size = len(members) // len(holders)
            for place, client in enumerate(holders):
                shares[client].append(members[place * size : (place + 1) * size])
        return [rng.permutation(np.concatenate(share)) for share in shares]


@dataclass(frozen=True, kw_only=True)
class LetterNetwork:
    """The network of the authors' code: hidden layers of 512, 256 and 64 units, and a softmax."""

    def build(self, task: Task) -> nn.Module:
        """Build the network."""
        return nn.Sequential(*Mlp(hidden=(512, 256, 64)).build(task).children(), nn.Softmax(1))


def describe_experiment(algorithm: str, rounds: int, seed: int) -> dict[str, Any]:
    """Return the tables of one federation."""
    where = "studies.representations.study"
    return {
        "data": {"name": f"{where}:FirstLetters", "standardise": False},
        "partition": {"name": f"{where}:NeighbouringClasses", "test_fraction": 0.1},
        "model": {"name": f"{where}:LetterNetwork"},
        "algorithm": ALGORITHMS[algorithm],
        "training": {
            "local_epochs": 5, "batch_size": 10, "learning_rate": 0.01, "momentum": 0.5, "weight_decay": 1e-4,
        },
        "federation": {"engine": "serial", "clients": CLIENTS, "rounds": rounds, "seed": seed},
        "strategy": {"name": "fedavg", "fraction_train": 0.1, "min_train_nodes": 1, "min_available_nodes": 1},
        "adversary": {"when": "never"},
        "recording": {"rounds": []},
    }  # fmt: skip


def measure(algorithm: str, rounds: int, seed: int) -> Row:
    """Return the mean accuracy of the clients' models on what they hold out, in percent, over the last rounds."""
    with tempfile.TemporaryDirectory() as folder:
        rows = fedsim.run(describe_experiment(algorithm, rounds, seed), out=Path(folder) / "run").metrics
    chosen = rows[(rows["client"] != "server") & (rows["round"] > rounds - AVERAGED_ROUNDS)]
    return {"accuracy": 100 * float(chosen["accuracy"].mean())}


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: accuracies beside those of the paper."""
    lines = []
    for algorithm, title in TITLES.items():
        line = [title, f"{PUBLISHED[algorithm]:.1f} %" if algorithm in PUBLISHED else "–"]
        for rounds in ("200", "100"):
            found = select_rows(rows, algorithm=algorithm, rounds=rounds)
            line.append(f"{column_values(found, 'accuracy').mean():.1f} %" if found else "not run")
        lines.append(line)
    return {"": markdown_table(["algorithm", "paper, 200 rounds", "ours, 200 rounds", "ours, 100 rounds"], lines)}
