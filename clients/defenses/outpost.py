"""Outpost: noise on the gradient of early local steps, where the Fisher information is large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clients.defenses.gradient_prune import zero_smallest
from fedsim.base.constraints import NonNegativeFloat, Share, ShareBelowOne
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class Outpost(Defense):
    """Prune small numbers of the gradient in early local steps, and add noise to informative ones.

    1. Step i of a round, counted from 0, is perturbed with probability 1 / (1 + decay * i). So the
       first step, the only one of a FedSGD client, is always perturbed.
    2. The share `pruned` of each tensor, smallest absolute values first, becomes zero.
    3. The share `noised` of the numbers of all tensors, those with the largest Fisher information,
       gets Gaussian noise of standard deviation noise_scale * min(1, v), where v is the variance of
       the weights of the tensor: a larger variance is taken to mean that the gradient reveals more.
       So a tensor whose weights are equal, such as biases of zero, gets no noise.

    No formal guarantee: the noise depends on the data, and the gradient that it should hide is not
    bounded.

    Args:
        noise_scale: standard deviation of the noise where v is 1, in units of the gradient; 0 adds
            none.
        noised: share of the numbers that get noise, at most 1; the count is rounded down.
        pruned: share of each tensor that is set to zero, below 1; the count is rounded down.
        decay: speed at which perturbed steps become rare, at least 0; 0 perturbs each.

    Raises:
        ConfigError: a setting is out of range.

    References:
        [Wang2023]. The defaults are those of its code in the framework Plato.
        Differs: the Fisher information is the elementwise square of the mini-batch's mean gradient;
        that code averages it over the first axis of each tensor. Steps are counted from 0 instead
        of 1.
    """

    noise_scale: NonNegativeFloat = 0.8
    noised: Share = 0.4
    pruned: ShareBelowOne = 0.8
    decay: NonNegativeFloat = 0.125

    against: ClassVar[str] = (
        "a server that inverts gradients without knowing of the noise; who knows which numbers are zero, or has many "
        "rounds to average, is left with more"
    )
    cost: ClassVar[str] = "accuracy, most in the first local steps of a round; no more bytes; a sort of each gradient"
    paper: ClassVar[Paper] = cite("Wang2023")

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        """Return the gradient, in a step that is perturbed pruned and with noise."""
        if torch.rand((), generator=context.rng).item() * (1 + self.decay * context.step) >= 1:
            return gradient
        informative = self._informative_masks(gradient)
        perturbed: dict[str, Tensor] = {}
        weights = context.weights
        for name, tensor in gradient.items():
            pruned = zero_smallest(tensor, self.pruned)
            perturbed[name] = self._add_noise(pruned, informative[name], weights[name], context.rng)
        return perturbed

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient with zeros where zero was sent.

        The noise has mean zero and is ignored. After several steps no number that was trained is
        zero, so nothing is masked.
        """
        return {name: tensor * (sent[name] != 0) for name, tensor in gradient.items()}

    def _informative_masks(self, gradient: State) -> dict[str, Tensor]:
        """Return for each tensor the mask of the numbers with the largest Fisher information."""
        information = torch.cat([tensor.flatten() for tensor in gradient.values()]).square()
        largest = information.topk(int(self.noised * information.numel()), sorted=False).indices
        is_informative = torch.zeros_like(information, dtype=torch.bool).index_fill(0, largest, value=True)
        masks = torch.split(is_informative, [tensor.numel() for tensor in gradient.values()])
        return {name: mask.view_as(tensor) for (name, tensor), mask in zip(gradient.items(), masks, strict=True)}

    def _add_noise(self, tensor: Tensor, mask: Tensor, weights: Tensor, rng: torch.Generator) -> Tensor:
        deviation = self.noise_scale * min(1.0, weights.var(correction=0).item())
        if not deviation:
            return tensor
        noise = torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype).to(tensor.device)
        return torch.where(mask, tensor + deviation * noise, tensor)
