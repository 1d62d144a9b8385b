"""Every data set with a model that suits it, and every model, in a short federation: accuracy after stated rounds.

    FEDSIM_DATA=DIR python benchmarks/data_and_models.py [NAME ...]

Prints a row of Markdown for each job as it ends (docs/data-and-models.md has them); data sets that are not in
DIR are named and left out. The guess is the share of the most frequent test class, or for a regression the
variance of the targets, and both accuracy and loss are those of the global model on the public test set.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedsim.base.errors import DataError
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.simulation import run_federation

BY_NATURE: dict[str, Any] = {"name": "natural"}


def job(
    data: dict[str, Any],
    model: dict[str, Any],
    partition: dict[str, Any] | None = None,
    *,
    clients: int = 10,
    rounds: int = 10,
    epochs: int = 1,
    batch_size: int = 20,
    learning_rate: float = 0.05,
    momentum: float = 0.0,
    optimizer: str = "sgd",
    **federation: Any,
) -> dict[str, Any]:
    """The tables of one experiment."""
    return {
        "data": data,
        "model": model,
        "partition": partition or {"name": "iid"},
        "training": {
            "local_epochs": epochs,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "momentum": momentum,
            "optimizer": optimizer,
        },
        "federation": {"clients": clients, "rounds": rounds, "seed": 1, "evaluate_every": 5, **federation},
        "recording": {"rounds": []},
        "adversary": {"when": "never"},
    }


CIFAR = {"name": "cifar10"}
SOME = {"name": "iid", "samples_per_client": 400}
FEW = {"name": "iid", "samples_per_client": 100}
WIDE = {"name": "mlp", "hidden": [256, 256, 256]}
SMALL = {"clients": 5, "rounds": 10, "momentum": 0.9, "learning_rate": 0.02}

JOBS: dict[str, dict[str, Any]] = {
    # Data sets.
    "digits": job({"name": "digits"}, {"name": "mlp"}, {"name": "dirichlet"}),
    "mnist by writer, the federation of SME": job(
        {"name": "mnist"},
        {"name": "sme-cnn"},
        BY_NATURE,
        clients=539,
        rounds=20,
        epochs=10,
        batch_size=50,
        learning_rate=0.004,
        straggler_probability=0.9,
        engine="ray",
    ),
    "fashion-mnist": job({"name": "fashion-mnist"}, {"name": "sme-cnn"}, {"name": "pathological"}),
    "emnist": job({"name": "emnist", "files": "test"}, {"name": "sme-cnn"}, SOME, epochs=2),
    "femnist": job({"name": "femnist", "folder": "femnist-digits"}, {"name": "sme-cnn"}, BY_NATURE, clients=12),
    "cifar10": job(CIFAR, {"name": "sme-cnn", "channels": [64, 128], "hidden": 200}, SOME, momentum=0.9),
    "cifar100": job(
        {"name": "cifar100"}, {"name": "sme-cnn", "channels": [64, 128], "hidden": 200}, SOME, momentum=0.9
    ),
    "svhn": job({"name": "svhn"}, {"name": "sme-cnn"}),
    "leaf, MNIST by writer": job(
        {"name": "leaf", "path": "leaf/mnist-by-writer"}, {"name": "lenet"}, BY_NATURE, clients=20, learning_rate=0.1
    ),
    "leaf, Shakespeare": job(
        {"name": "leaf", "path": "leaf/shakespeare"},
        {"name": "lstm", "hidden": 64, "layers": 1},
        BY_NATURE,
        clients=30,
        optimizer="adam",
        learning_rate=0.01,
        epochs=2,
    ),
    "leaf-synthetic": job(
        {"name": "leaf-synthetic"}, WIDE, BY_NATURE, rounds=100, batch_size=512, learning_rate=0.01, momentum=0.9
    ),
    "att-faces": job(
        {"name": "att-faces"},
        {"name": "mlp", "hidden": [32, 32, 32]},
        {"name": "att-faces-by-person"},
        rounds=100,
        batch_size=32,
        momentum=0.9,
        learning_rate=0.01,
    ),
    "adult": job({"name": "adult"}, WIDE, {"name": "adult-by-age"}, rounds=100, batch_size=512, learning_rate=0.1),
    "flight-prices": job(
        {"name": "flight-prices", "max_examples": 100_000},
        WIDE,
        BY_NATURE,
        clients=6,
        rounds=20,
        batch_size=512,
        learning_rate=0.01,
        momentum=0.9,
    ),
    "flight-prices, linear": job(
        {"name": "flight-prices", "max_examples": 100_000}, {"name": "linear"}, BY_NATURE, clients=6, batch_size=512
    ),
    "reuters-r8": job(
        {"name": "reuters-r8"},
        {"name": "text-cnn"},
        SOME | {"samples_per_client": 200},
        optimizer="adam",
        learning_rate=0.003,
        epochs=2,
    ),
    "image-folder": job(
        {"name": "image-folder", "path": "att_faces", "size": 64}, {"name": "lenet"}, learning_rate=0.1, epochs=10
    ),
    "csv": job(
        {"name": "csv", "path": "flight-prices/Clean_Dataset.csv.gz", "target": "class", "drop": ["flight"]},
        {"name": "linear"},
        rounds=5,
        batch_size=512,
    ),
    # Models.
    "mlp 1000-1000": job({"name": "emnist", "files": "test"}, {"name": "mlp", "hidden": [1000, 1000]}, SOME, epochs=2),
    "mlp 3 x 256 with batch norm": job(
        {"name": "adult"},
        {**WIDE, "batch_norm": True},
        {"name": "adult-by-age"},
        rounds=20,
        batch_size=512,
        learning_rate=0.01,
    ),
    "linear": job({"name": "digits"}, {"name": "linear"}),
    "tgias-lenet": job({"name": "emnist", "files": "test"}, {"name": "tgias-lenet"}, SOME, epochs=2),
    "alexnet": job(CIFAR, {"name": "alexnet"}, FEW, **SMALL),
    "vgg9": job({"name": "digits"}, {"name": "vgg9"}, optimizer="adam", learning_rate=0.001),
    "resnet8": job(CIFAR, {"name": "resnet8"}, FEW, **SMALL),
    "resnet18": job({"name": "digits"}, {"name": "resnet18"}),
    "convnet": job(
        {"name": "leaf", "path": "leaf/mnist-by-writer"},
        {"name": "convnet"},
        FEW | {"samples_per_client": 50},
        **SMALL,
    ),
    "vit-april": job(CIFAR, {"name": "vit-april"}, FEW, **SMALL | {"learning_rate": 0.01}),
    "shufflenet-v2": job(
        {"name": "image-folder", "path": "att_faces", "size": 64}, {"name": "shufflenet-v2"}, **SMALL, epochs=4
    ),
    "torchvision": job(
        {"name": "image-folder", "path": "att_faces", "size": 64},
        {"name": "torchvision", "architecture": "resnet18"},
        **SMALL,
        epochs=2,
    ),
}


def row(name: str, tables: dict[str, Any]) -> str:
    """Run one job; what came of it, as a row of Markdown."""
    config = validate_tables(Config, tables, name)
    began = time.monotonic()
    experiment = Experiment(config)
    data = experiment.dataset
    loaded = time.monotonic() - began
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        run_federation(config, folder := OpenRun(Path(out) / "run"))
        seconds = time.monotonic() - began
        rows = {int(r["round"]): r for r in read_rows(folder.metrics) if r["client"] == "server"}
    federation, training = config.federation, config.training
    shown = sorted({n for n in (5, 10, 20) if n < federation.rounds} | {federation.rounds})
    if data.num_classes:
        guess = f"{torch.bincount(data.test.labels).max().item() / len(data.test):.1%}"
        got = ", ".join(f"{float(rows[n]['accuracy']):.1%} ({n})" for n in shown)
    else:
        guess = f"MSE {data.test.labels.var().item():.3f}"
        got = ", ".join(f"MSE {float(rows[n]['loss']):.3f} ({n})" for n in shown)
    plugins = [
        json.dumps(tables[table])[1:-1].replace('"', "").replace("name: ", "")
        for table in ("data", "model", "partition")
    ]
    setting = f"{federation.clients}, {training.local_epochs}, {training.batch_size}, {training.learning_rate:g}"
    momentum = f", momentum {training.momentum}" if training.momentum else ""
    optimizer = ", Adam" if training.optimizer == "adam" else ""
    cells = [name, *plugins, f"{setting}{momentum}{optimizer}", guess, got, f"{loaded:.1f}", f"{seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the named jobs, or all."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print("| job | data | model | partition | clients, E, B, lr | guess | accuracy (round) | loading, s | run, s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or JOBS:
        try:
            print(row(name, JOBS[name]), flush=True)
        except DataError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
