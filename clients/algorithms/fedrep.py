"""FedRep: clients learn their heads for a shared representation, and then the representation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clients.algorithms.heads import BODY, HEAD, BodySharing
from fedsim.base.constraints import PositiveInt
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedRep(BodySharing):
    """Train the head with the body fixed, then the body with the head fixed, and send the body.

    Args:
        head_epochs: passes over the local data in which the head is trained; those of the body are
            the epochs or steps of `[training]`.

    References:
        [Collins2021], Algorithm 1. Differs: heads begin with weights of their own, and the running
        statistics of BatchNorm layers move in both passes.
    """

    head_epochs: PositiveInt = 5

    counts_steps: ClassVar[bool] = False
    paper: ClassVar[Paper] = cite("Collins2021")

    def train_client(self, client: LocalClient) -> ClientResult:
        """Train the head, then the body."""
        with_head = client.train(client.model, name="head", trained=client.parts[HEAD], local_epochs=self.head_epochs)
        return ClientResult(model=client.train(with_head, trained=client.parts[BODY]))
