"""Noise on the gradient of early local steps, where the Fisher information is large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clients.defenses.gradient_prune import without_smallest
from fedsim.attacks import Paper
from fedsim.defense import Defense
from fedsim.errors import ConfigError
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class Outpost(Defense):
    """In early local steps, set small numbers of the gradient to zero and add noise to its most informative ones.

    Step i of a round, counted from 0, is perturbed with probability 1 / (1 + decay * i): always the first, which is
    all that a FedSGD client takes. The share `pruned` of each tensor, smallest absolute values first, becomes zero. The
    share `noised` of the numbers of all tensors where the Fisher information is largest gets Gaussian noise of standard
    deviation noise_scale * min(1, v), where v is the variance of the weights of that tensor: the further weights are
    spread, the more the gradient is taken to tell. So a tensor whose weights are all alike, as biases of zero, gets no
    noise.

    No formal guarantee: how much noise there is depends on the data, and nothing bounds what it is to hide.

    Args:
        noise_scale: standard deviation of the noise where v is 1, in units of the gradient; 0 adds none.
        noised: share of the numbers that get noise, at most 1; the count is rounded down.
        pruned: share of each tensor that is set to zero, below 1; the count is rounded down.
        decay: how fast perturbed steps become rare, at least 0; 0 perturbs each.

    Raises:
        ConfigError: a setting is out of range.

    References:
        Wang, Hugh, Li: More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production
        Federated Learning, INFOCOM 2023. The defaults are those of its code in the framework Plato.
        Differs: the Fisher information is that of the one mini-batch, the square of its mean gradient, number by
        number; that code averages it over the first axis of each tensor. Steps are counted from 0 instead of 1.
    """

    noise_scale: float = 0.8
    noised: float = 0.4
    pruned: float = 0.8
    decay: float = 0.125

    against: ClassVar[str] = (
        "a server that inverts gradients without knowing of the noise; who knows which numbers are zero, or has many "
        "rounds to average, is left with more"
    )
    cost: ClassVar[str] = "accuracy, most in the first local steps of a round; no more bytes; a sort of each gradient"
    paper: ClassVar[Paper] = Paper(
        title="More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production Federated "
        "Learning",
        authors="Wang, Hugh, Li",
        venue="INFOCOM",
        year=2023,
        url="https://iqua.ece.toronto.edu/research/gradient-leakage-in-federated-learning/",
    )

    def __post_init__(self) -> None:
        for name in ("noise_scale", "decay"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}: expected a finite value of at least 0, got {value}")
        if not 0 <= self.noised <= 1:
            raise ConfigError(f"noised: expected a share from 0 to 1, got {self.noised}")
        if not 0 <= self.pruned < 1:
            raise ConfigError(f"pruned: expected a share of at least 0, below 1, got {self.pruned}")

    def on_gradient(  # type: ignore[override]
        self, gradient: State, *, rng: torch.Generator, weights: State, step: int
    ) -> State:
        """See Defense."""
        if torch.rand((), generator=rng).item() * (1 + self.decay * step) >= 1:
            return gradient
        informative = self._informative(gradient)
        return {
            name: self._noisy(without_smallest(tensor, self.pruned), informative[name], weights[name], rng)
            for name, tensor in gradient.items()
        }

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. What was sent as zero is zero; noise has the expectation zero.

        After several steps no number that was trained is zero, and then nothing is masked.
        """
        return {name: tensor * (sent[name] != 0) for name, tensor in gradient.items()}

    def _informative(self, gradient: State) -> dict[str, Tensor]:
        """Where noise is added, by name."""
        information = torch.cat([tensor.flatten() for tensor in gradient.values()]).square()
        largest = information.topk(int(self.noised * information.numel()), sorted=False).indices
        chosen = torch.zeros_like(information, dtype=torch.bool).index_fill(0, largest, value=True)
        masks = torch.split(chosen, [tensor.numel() for tensor in gradient.values()])
        return {name: mask.view_as(tensor) for (name, tensor), mask in zip(gradient.items(), masks, strict=True)}

    def _noisy(self, tensor: Tensor, chosen: Tensor, weights: Tensor, rng: torch.Generator) -> Tensor:
        deviation = self.noise_scale * min(1.0, weights.var(correction=0).item())
        if not deviation:
            return tensor
        noise = torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype).to(tensor.device)
        return torch.where(chosen, tensor + deviation * noise, tensor)
