"""FedDyn: a regulariser that moves with each client aligns local optima with the federation's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.base.constraints import PositiveFloat
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.recording.known_terms import LINEAR_KEY, is_parameter
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class FedDynClient(ClientAlgorithm):
    """Minimise the loss - <g_k, w> + alpha / 2 |w - w_t|^2, where g_k is the gradient at the last end.

    Where a client reaches the minimum, g_k - alpha (w_T - w_t) is the gradient of its loss there,
    and becomes g_k for its next round. So g_k is -alpha times the sum of its moves w_T - w_t, and a
    server that saw all its messages knows it, as well as the state h of its own. Attacks are given
    updates from which the linear term is removed, and are told alpha as the weight of a proximal
    term: against them the clients are those of FedProx.

    Args:
        alpha: weight of the regulariser, in units of loss over squared weights.

    References:
        [Acar2021], Algorithm 1. Differs: clients take the local steps of `[training]`, where the
        paper lets each find the minimum.
    """

    alpha: PositiveFloat = 0.1

    strategies: ClassVar[tuple[str, ...]] = ("feddyn",)
    keeps: ClassVar[str] = "its gradient at the model that it sent last"
    paper: ClassVar[Paper] = cite("Acar2021")

    def check(self, training: LocalTraining) -> None:
        """Raise ConfigError unless clients take plain steps, from which the linear term is removed."""
        training.check_plain_steps("feddyn is for plain steps, each of which adds the same linear term")

    def training_facts(self) -> Mapping[str, float]:
        """Return alpha, so that attacks simulate the proximal term."""
        return {"proximal_mu": self.alpha}

    def message_facts(self) -> Mapping[str, float]:
        """Return alpha, with which whoever reads the messages computes a client's linear term."""
        return {LINEAR_KEY: self.alpha}

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take local steps with the regulariser, then renew g_k."""
        start = client.model
        # w <- w - eta (gradient of the loss - g_k + alpha (w - w_t)), K times.
        correction = {name: -gradient for name, gradient in client.memory.items()}
        after = client.train(start, proximal_mu=self.alpha, correction=correction)

        # g_k <- g_k - alpha (w_T - w_t).
        for name, tensor in after.items():
            if is_parameter(name, tensor):
                last_gradient = client.memory.get(name, torch.zeros_like(tensor))
                client.memory[name] = last_gradient - self.alpha * (tensor - start[name])
        return ClientResult(model=after)
