"""Fully connected networks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt, ShareBelowOne
from fedsim.base.task import Task
from fedsim.training.models import input_size


@dataclass(frozen=True, kw_only=True)
class Mlp(CheckedSettings):
    """A fully connected network with ReLU between its layers and none after the last.

    Some papers' networks are settings of it. SME [Zhu2023], App. G: `hidden = [1000, 1000]`, to
    which the authors' released code adds `output_relu`. LMRA [Driouich2022], App. C.1: `hidden =
    [256, 256, 256]`, for the AT&T faces `[32, 32, 32]`, with `batch_norm` or without.

    Args:
        hidden: units of each hidden layer.
        batch_norm: normalise before each ReLU between layers.
        dropout: probability of dropping a hidden unit, in [0, 1).
        output_relu: ReLU after the last layer too, so that no logit is negative.
    """

    hidden: tuple[PositiveInt, ...] = (200,)
    batch_norm: bool = False
    dropout: ShareBelowOne = 0.0
    output_relu: bool = False

    def build(self, task: Task) -> nn.Module:
        """Build the network; inputs of any shape are flattened."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = input_size(task, "mlp")
        for units in self.hidden:
            layers.append(nn.Linear(width, units))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(nn.ReLU())
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            width = units
        layers.append(nn.Linear(width, task.outputs))
        return nn.Sequential(*layers, *([nn.ReLU()] if self.output_relu else []))
