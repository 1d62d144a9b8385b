"""FedRep: clients learn their heads for a shared representation, and then the representation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from clients.algorithms.heads import BODY, HEAD, divide_into_body_and_head
from fedsim.base.constraints import PositiveInt
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedRep(ClientAlgorithm):
    """Train the head with the body fixed, then the body with the head fixed, and send the body.

    Args:
        head: names of the layers or blocks of the model that stay with the client, such as
            `["classifier"]`; empty for the last linear layer.
        head_epochs: passes over the local data in which the head is trained; those of the body are
            the epochs or steps of `[training]`.

    References:
        [Collins2021], Algorithm 1. Differs: heads begin with weights of their own, and the running
        statistics of BatchNorm layers move in both passes.
    """

    head: tuple[str, ...] = ()
    head_epochs: PositiveInt = 5

    private_parts: ClassVar[frozenset[str]] = frozenset({HEAD})
    personal: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False
    keeps: ClassVar[str] = "the head of its model"
    sends: ClassVar[str] = "the body of its model"
    paper: ClassVar[Paper] = cite("Collins2021")

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in body and head."""
        return divide_into_body_and_head(network, self.head)

    def train_client(self, client: LocalClient) -> ClientResult:
        """Train the head, then the body."""
        with_head = client.train(client.model, name="head", trained=client.parts[HEAD], local_epochs=self.head_epochs)
        return ClientResult(model=client.train(with_head, trained=client.parts[BODY]))
