"""fluke: FedAVG with its own FastDataLoader, models in memory, evaluation off, one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver
from torch import Tensor

from frameworks.clock import CLOCK
from frameworks.jobs import BATCH, CLASSES, LEARNING_RATE, Task


class Splitter:
    """Hands out the job's data in fluke's way."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def assign(self, clients: int, batch_size: int) -> Any:
        """Return training loaders, no test loaders, no data for the server."""
        pairs = zip(*self.task.work.data(clients), strict=True)
        train = [FastDataLoader(x, y, num_labels=CLASSES, batch_size=batch_size) for x, y in pairs]
        return (train, [None] * clients), None


class Timer(FederationObserver):  # type: ignore[misc]
    """Tells the clock when the server has aggregated."""

    def end_round(self, round: int) -> None:
        """See FederationObserver."""
        CLOCK.round_over()


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    settings = {
        "client": {
            "batch_size": BATCH,
            "local_epochs": 1,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": LEARNING_RATE},
            "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        },
        "server": {"weighted": True},
        "model": task.work.network(),
    }
    algorithm = FedAVG(task.clients, Splitter(task), DDict(**settings))
    algorithm.set_callbacks([Timer()])
    algorithm.run(task.rounds, eligible_perc=1.0)
    state: Mapping[str, Tensor] = algorithm.server.model.state_dict()
    return state
