"""Parts of networks, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Branching(nn.Module):
    """A layer whose control flow depends on values, which cannot be computed for several at once."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 1e9 else inputs * 1.5


def build_convolution(activation: type[nn.Module] = nn.Tanh, norm: bool = False) -> nn.Module:
    """Return a convolution and two linear layers for images of 1 x 8 x 8, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity(), activation(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 9, 20), activation(), nn.Linear(20, 4))


def compute_gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the cross-entropy by the names of parameters."""
    slopes = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
    return {name: slope for (name, _), slope in zip(model.named_parameters(), slopes, strict=True)}
