"""MOON: representations stay near those of the shared model, and leave those of the client's last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedsim.base.constraints import PositiveFloat
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.training.features import check_representation


@dataclass(frozen=True, kw_only=True)
class Moon(ClientAlgorithm):
    """Add mu times a contrastive loss of representations to the loss of each batch.

    The representation z of an example is what enters the last linear layer. It is to be alike that
    of the model that the server sent, z_glob, and unlike that of the model that the client sent
    last, z_prev; a client that has sent none yet trains as in FedAvg. The server has both models,
    but attacks simulate the loss alone, which is near the truth where mu is small: at w_t the
    pull to z_glob has no gradient.

    Args:
        mu: weight of the contrastive loss.
        temperature: tau, by which cosines are divided.

    References:
        [Li2021c], Algorithm 1, Eq. 3. Differs: no projection head is put below the last layer; a
        model that has one of its own is trained with it.
    """

    mu: PositiveFloat = 1.0
    temperature: PositiveFloat = 0.5

    adds_to_loss: ClassVar[bool] = True
    keeps: ClassVar[str] = "the model that it sent last"
    paper: ClassVar[Paper] = cite("Li2021c")

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the whole model as one part.

        Raises:
            ConfigError: the network computes no representation.
        """
        check_representation(network, "moon")
        return super().divide_model(network)

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take the local steps of `[training]` with the contrastive loss, and keep the model."""
        if not client.memory:
            after = client.train(client.model)
        else:
            represent_by_global = client.make_representation(client.model)
            represent_by_previous = client.make_representation(client.memory)

            def contrast(inputs: Tensor, features: Tensor) -> Tensor:
                # -log(exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau))), s being cosines.
                to_global = cosine_similarity(features, represent_by_global(inputs))
                to_previous = cosine_similarity(features, represent_by_previous(inputs))
                logits = torch.stack([to_global, to_previous], 1) / self.temperature
                return self.mu * cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))

            after = client.train(client.model, feature_loss=contrast)
        client.memory.update(after)
        return ClientResult(model=after)
