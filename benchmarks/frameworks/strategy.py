"""Flower's FedAvg itself, watched from outside, because fedsim averages for that class and none derived from it."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from frameworks.clock import CLOCK

_latest: list[ArrayRecord] = []
"""The newest global model."""


def watch_fedavg() -> None:
    """Have FedAvg tell the clock when it has aggregated, and keep the model for the end."""
    aggregate_train = FedAvg.aggregate_train

    @wraps(aggregate_train)
    def aggregate_and_tell(self: FedAvg, server_round: int, replies: Any) -> Any:
        arrays, metrics = aggregate_train(self, server_round, replies)
        if arrays is None:
            raise RuntimeError(f"round {server_round}: clients failed, so there is nothing to measure")
        _latest[:] = [arrays]
        CLOCK.round_over()
        return arrays, metrics

    FedAvg.aggregate_train = aggregate_and_tell  # type: ignore[method-assign]


def latest_state() -> dict[str, Tensor]:
    """Return the newest global model."""
    return {name: torch.tensor(array.numpy()) for name, array in _latest[0].items()}
