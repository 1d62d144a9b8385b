"""PRECODE: a fully connected network with a variational bottleneck before its last layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings, NonNegativeFloat, PositiveInt
from fedsim.base.loss_term import with_loss_term
from fedsim.base.task import Task
from fedsim.training.models import input_size


class VariationalBottleneck(nn.Module):
    """Encode features as a normal distribution, and decode a sample of it in training, its mean in evaluation.

    Attributes:
        encoder: features to means and log variances, `2 code`.
        decoder: code to outputs.
        weight: of the KL divergence from the standard normal distribution, which is added to the
            loss of each example.
    """

    adds_loss_term = True

    def __init__(self, width: int, size: int, outputs: int, weight: float) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, 2 * size), nn.Linear(size, outputs)
        self.weight = weight

    def forward(self, features: Tensor) -> Tensor:
        """Map `example feature` to `example output`, which carry the term of the loss."""
        mean, log_variance = self.encoder(features).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return with_loss_term(self.decoder(code), self.weight * divergence)


@dataclass(frozen=True, kw_only=True)
class Precode(CheckedSettings):
    """A fully connected network whose features pass through a variational bottleneck.

    In training, the last layer sees a random sample around the code of each example, which is meant
    to keep gradients from revealing the data. The layers before are as in `mlp`: the gradient of
    the first one still is a sum of the examples of the batch, and attacks that solve for these
    (`analytic`, `spear-ica`) need no other layer. `training.dropout = false` switches sampling off,
    as all that draws.

    Args:
        hidden: units of each hidden layer.
        bottleneck: size of the code.
        weight: beta, of the KL divergence in the loss.

    References:
        [Scheliga2022]. Differs: the last layer of `mlp` is replaced, where the paper inserts the
        bottleneck before the output layer of any network.
    """

    hidden: tuple[PositiveInt, ...] = (200,)
    bottleneck: PositiveInt = 256
    weight: NonNegativeFloat = 1e-3

    def build(self, task: Task) -> nn.Module:
        """Build the network; inputs of any shape are flattened."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = input_size(task, "precode")
        for units in self.hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        return nn.Sequential(*layers, VariationalBottleneck(width, self.bottleneck, task.outputs, self.weight))
