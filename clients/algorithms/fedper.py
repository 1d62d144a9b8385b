"""FedPer: the last layers stay with each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from clients.algorithms.heads import HEAD, divide_into_body_and_head
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedPer(ClientAlgorithm):
    """Train body and head together, send the body, and keep the head.

    Args:
        head: names of the layers or blocks of the model that stay with the client, such as
            `["classifier"]`; empty for the last linear layer.

    References:
        [Arivazhagan2019], Algorithms 1 and 2.
    """

    head: tuple[str, ...] = ()

    private_parts: ClassVar[frozenset[str]] = frozenset({HEAD})
    personal: ClassVar[bool] = True
    keeps: ClassVar[str] = "the head of its model"
    sends: ClassVar[str] = "the body of its model"
    paper: ClassVar[Paper] = cite("Arivazhagan2019")

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in body and head."""
        return divide_into_body_and_head(network, self.head)

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps of `[training]` on body and head."""
        return ClientResult(model=client.train(client.model))
