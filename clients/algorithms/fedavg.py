"""FedAvg: each client trains the whole model from where the server is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedAvgClient(ClientAlgorithm):
    """Train the whole model and send it; with strategy `fedsgd`, send the gradient of a mini-batch.

    It is what clients do where an experiment has no table `[algorithm]`.

    References:
        [McMahan2017], Algorithm 1 (ClientUpdate).
    """

    paper: ClassVar[Paper] = cite("McMahan2017")

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps of `[training]`."""
        return ClientResult(model=client.train(client.model))
