"""FedBN: BatchNorm layers stay with each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedsim.base.errors import ConfigError
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.training.modes import list_batch_norms
from fedsim.training.settings import LocalTraining

_NORMALISATION = "normalisation"


@dataclass(frozen=True, kw_only=True)
class FedBn(ClientAlgorithm):
    """Train the whole model, and keep scale, shift and running statistics of BatchNorm layers.

    References:
        [Li2021a], Algorithm 1.
    """

    private_parts: ClassVar[frozenset[str]] = frozenset({_NORMALISATION})
    personal: ClassVar[bool] = True
    keeps: ClassVar[str] = "its BatchNorm layers"
    sends: ClassVar[str] = "all other layers"
    paper: ClassVar[Paper] = cite("Li2021a")

    def check(self, training: LocalTraining) -> None:
        """Raise ConfigError where clients would drop the running statistics that they have to keep."""
        if training.batch_norm_statistics != "shared":
            raise ConfigError(
                "training.batch_norm_statistics: fedbn keeps running statistics on the clients anyway, "
                f"expected 'shared', got {training.batch_norm_statistics!r}; leave it out"
            )

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors of BatchNorm layers, and of all others."""
        layers = list_batch_norms(network)
        if not layers:
            raise ConfigError(
                "algorithm: fedbn keeps BatchNorm layers on the clients, and the model has none; choose another model "
                "or algorithm"
            )
        shared: list[str] = []
        kept: list[str] = []
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                (kept if name.rpartition(".")[0] in layers else shared).append(name)
        return {"shared": shared, _NORMALISATION: kept}

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps of `[training]` with the client's own BatchNorm layers."""
        return ClientResult(model=client.train(client.model))
