"""Flower's FedAvg, unchanged but for looking at the clock."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from frameworks.clock import CLOCK


class TimedFedAvg(FedAvg):
    """FedAvg that tells the clock when it has aggregated, and keeps the model for the end."""

    latest: ArrayRecord

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """See FedAvg."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            raise RuntimeError(f"round {server_round}: clients failed, so there is nothing to measure")
        TimedFedAvg.latest = arrays
        CLOCK.round_over()
        return arrays, metrics
