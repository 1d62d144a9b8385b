"""What a round of convolutional clients takes on an accelerator: at once, and one after the other.

    python benchmarks/accelerated_clients.py --device cuda [--clients 100] [--engine serial] [--out FILE.json]

Clients have 50 images of 3 x 32 x 32 and train SME's CNN for CIFAR-100 for 20 epochs in batches of 10, without and with
DP-SGD. Seconds are those of the second round, by the clock. The last column is the distance of the global model after
it to that of the first way with the same defense, relative to its distance from w_0: both ways differ by rounding. On a
CPU, clients with such a network train one after the other, so both ways are the same.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from frameworks.clock import CLOCK
from measuring import Row, make_parser, publish_rows

from fedsim.data import Dataset, Examples
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables

CLASSES, COUNT, SHAPE = 100, 50, (3, 32, 32)
DEFENSES: dict[str, list[dict[str, Any]]] = {"": [], "dp-sgd": [{"name": "dp-sgd", "noise_multiplier": 1.0}]}


@dataclass(frozen=True, kw_only=True)
class ColourImages:
    """Random images, 50 for each of `clients`."""

    clients: int

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        del folder
        rng = torch.Generator().manual_seed(0)
        labels = torch.randint(CLASSES, (self.clients * COUNT,), generator=rng)
        raw = torch.randint(256, (len(labels), *SHAPE), generator=rng, dtype=torch.uint8)
        train = Examples(raw=raw, labels=labels, scale=1 / 255)
        test = Examples(raw=255 - raw[:1], labels=labels[:1], scale=1 / 255)
        return Dataset(
            name="synthetic", train=train, test=test, num_classes=CLASSES, source="generated", licence="none needed"
        )


def make_config(options: argparse.Namespace, defense: str, *, at_once: bool) -> Config:
    """Return the experiment of one way."""
    tables = {
        "data": {"name": "accelerated_clients:ColourImages", "clients": options.clients, "standardise": False},
        "partition": {"name": "iid"},
        "model": {"name": "sme-cnn", "channels": [64, 128], "hidden": 200},
        "training": {"local_epochs": options.epochs, "batch_size": 10, "learning_rate": 0.004},
        "federation": {
            "engine": options.engine,
            "device": options.device,
            "clients": options.clients,
            "rounds": 2,
            "evaluate_every": 0,
            "vectorise": at_once,
        },
        "defense": DEFENSES[defense],
        "recording": {"rounds": [1]},
        "adversary": {"when": "never"},
    }
    return validate_tables(Config, tables, "benchmark")


def measure_ways(options: argparse.Namespace) -> list[Row]:
    """Run a federation of two rounds each way."""
    from frameworks.strategy import latest_state, watch_fedavg  # not before fedsim has told Flower to be quiet

    watch_fedavg()
    rows: list[Row] = []
    for defense in DEFENSES:
        first: torch.Tensor | None = None
        for at_once in (False, True):
            config = make_config(options, defense, at_once=at_once)
            CLOCK.set(rounds=2, warm_up=1)
            with tempfile.TemporaryDirectory() as folder:
                run_federation(config, OpenRun(Path(folder) / "run"))
            start, end = (
                torch.cat([tensor.flatten() for tensor in state.values()])
                for state in (Experiment(config).initial_state(), latest_state())
            )
            first = end if first is None else first
            about = {"defense": defense, "way": "at once" if at_once else "one by one", "clients": options.clients}
            rows.append({**about, "s": CLOCK.wall, "distance": float((end - first).norm() / (first - start).norm())})
    return rows


def main() -> None:
    """Measure all ways."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", choices=("serial", "ray"), default="serial")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    publish_rows(measure_ways(options), options.out)


if __name__ == "__main__":
    main()
