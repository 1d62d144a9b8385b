"""FedProx: clients are pulled towards the model that the server sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import PositiveFloat
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient


@dataclass(frozen=True, kw_only=True)
class FedProxClient(ClientAlgorithm):
    """Add mu / 2 |w - w_t|^2 to the local objective, so that clients drift less far apart.

    Strategy `fedprox` is the same algorithm with mu sent by the server.

    Args:
        mu: weight of the proximal term, in units of loss over squared weights.

    References:
        [Li2020], Algorithm 2. Differs: clients take the local steps of `[training]`, where the
        paper lets each solve its objective as exactly as it can.
    """

    mu: PositiveFloat = 0.01

    paper: ClassVar[Paper] = cite("Li2020")

    def training_facts(self) -> Mapping[str, float]:
        """Return mu, so that attacks simulate the proximal term."""
        return {"proximal_mu": self.mu}

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps with the proximal term."""
        return ClientResult(model=client.train(client.model, proximal_mu=self.mu))
