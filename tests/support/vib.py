"""A network with a variational bottleneck, as PRECODE puts one before the last layer; it adds a term to the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedsim import Task, with_loss_term


class Vib(nn.Module):
    """A linear encoder to means and log variances, a sample of these in training, and a linear layer of classes.

    Args:
        size: of the flattened inputs.
        classes: number of outputs.
        weight: of the KL divergence from the standard normal distribution.
        is_noisy: whether training samples.
    """

    adds_loss_term = True

    def __init__(self, size: int, classes: int, weight: float, is_noisy: bool) -> None:
        super().__init__()
        self.encoder, self.last = nn.Linear(size, 2 * 12), nn.Linear(12, classes)
        self.weight, self.is_noisy = weight, is_noisy

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits that carry the weighted KL divergence of each example."""
        mean, log_variance = self.encoder(inputs.flatten(1)).chunk(2, 1)
        code = mean
        if self.training and self.is_noisy:
            code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return with_loss_term(self.last(code), self.weight * divergence)


def build(task: Task, weight: float = 0.1, noise: bool = True) -> nn.Module:
    """Build the network for a task of classes."""
    return Vib(math.prod(task.input_shape), task.outputs, weight, noise)


def build_undeclared(task: Task) -> nn.Module:
    """Build one that adds a term and does not say so."""
    network = build(task)
    network.adds_loss_term = False  # type: ignore[assignment]
    return network
