"""FedPer: the last layers stay with each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clients.algorithms.heads import BodySharing
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedPer(BodySharing):
    """Train body and head together, send the body, and keep the head.

    References:
        [Arivazhagan2019], Algorithms 1 and 2.
    """

    paper: ClassVar[Paper] = cite("Arivazhagan2019")

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps of `[training]` on body and head."""
        return ClientResult(model=client.train(client.model))
