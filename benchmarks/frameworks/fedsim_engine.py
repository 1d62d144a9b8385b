"""fedsim through `fedsim.federation.simulation.run_federation`, as the command line calls it.

The curious server is always there. It records the first round alone, unless asked to record each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message
from torch import Tensor, nn

import fedsim.base.task
from fedsim.data import Dataset, Examples
from fedsim.federation.config import Config
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from frameworks.clock import CLOCK
from frameworks.jobs import ACTORS, BATCH, CLASSES, JOBS, LEARNING_RATE, SCALE, Task


@dataclass(frozen=True, kw_only=True)
class JobImages:
    """Synthetic images for `clients` clients of `job`."""

    job: str
    clients: int

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`."""
        raw, labels = (tensor.flatten(0, 1) for tensor in JOBS[self.job].images(self.clients))
        train = Examples(raw=raw, labels=labels, scale=SCALE)
        test = Examples(raw=raw[:1], labels=labels[:1], scale=SCALE)
        return Dataset(
            name="synthetic", train=train, test=test, num_classes=CLASSES, source="generated", licence="none needed"
        )


@dataclass(frozen=True, kw_only=True)
class JobNetwork:
    """The network of `job`."""

    job: str

    def build(self, task: fedsim.base.task.Task) -> nn.Module:
        """See `ModelPlugin`."""
        return JOBS[self.job].network()


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    plugin = {"name": f"{__name__}:JobNetwork", "job": task.job}
    tables = {
        "data": plugin | {"name": f"{__name__}:JobImages", "clients": task.clients, "standardise": False},
        "partition": {"name": "dirichlet", "alpha": 1.0} if task.skewed else {"name": "iid"},
        "model": plugin,
        "training": {"local_epochs": 1, "batch_size": BATCH, "learning_rate": LEARNING_RATE},
        "federation": {
            "engine": task.engine,
            "clients": task.clients,
            "rounds": task.rounds,
            "evaluate_every": 0,
            "actors": ACTORS,
            "vectorise": not task.loop,
        },
        "strategy": {
            "name": "fedavg",
            "fraction_train": task.trained / task.clients,
        },
        "recording": {} if task.record else {"rounds": [1]},
    }
    config = validate_tables(Config, tables, "benchmark")
    from frameworks.strategy import latest_state, watch_fedavg  # not before fedsim has told Flower to be quiet

    watch_fedavg()
    _watch_clients()
    with tempfile.TemporaryDirectory() as folder:
        run_federation(config, OpenRun(Path(folder) / "run"))
    return latest_state()


def _watch_clients() -> None:
    """Have engine serial tell the clock what clients do; those of engine ray do it in other processes."""
    answer_message = InProcessGrid.answer_message

    def answer_and_tell(self: InProcessGrid, message: Message) -> Message:
        with CLOCK.training():
            return answer_message(self, message)

    InProcessGrid.answer_message = answer_and_tell  # type: ignore[method-assign]
