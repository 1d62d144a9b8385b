"""fedsim through `fedsim.federation.simulation.run_federation`, as the command line calls it.

The curious server is always there. It records the first round alone, unless asked to record each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.federation.config import Config, validate_tables
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from frameworks.jobs import BATCH, LEARNING_RATE
from frameworks.task import Task


def experiment(task: Task, engine: str) -> dict[str, Any]:
    """The experiment file of a task."""
    return {
        "data": {"name": "frameworks.plugins:Images", "job": task.job, "clients": task.clients, "standardise": False},
        "partition": {"name": "dirichlet", "alpha": 1.0} if task.skewed else {"name": "iid"},
        "model": {"name": "frameworks.plugins:Network", "job": task.job},
        "training": {"local_epochs": 1, "batch_size": BATCH, "learning_rate": LEARNING_RATE},
        "federation": {
            "engine": engine,
            "clients": task.clients,
            "rounds": task.rounds,
            "evaluate_every": 0,
            "actors": task.actors,
            "vectorise": not task.loop,
        },
        "strategy": {"name": "frameworks.strategy:TimedFedAvg", "fraction_train": task.sampled / task.clients},
        "recording": {} if task.record else {"rounds": [1]},
    }


def run_on(engine: str, task: Task) -> Mapping[str, Tensor]:
    """The final global model."""
    with tempfile.TemporaryDirectory() as folder:
        run_federation(validate_tables(Config, experiment(task, engine), "benchmark"), OpenRun(Path(folder) / "run"))
    from frameworks.strategy import TimedFedAvg  # not before fedsim has told Flower to be quiet

    return {name: torch.tensor(array.numpy()) for name, array in TimedFedAvg.latest.items()}
