"""Fully connected networks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.errors import ConfigError
from fedsim.base.task import Task
from fedsim.training.models import input_size


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A fully connected network with ReLU between its layers and none after the last.

    Some papers' networks are settings of it. Zhu et al. 2023 (SME), App. G: `hidden = [1000,
    1000]`, to which the authors' released code adds `output_relu`. Driouich et al. 2022 (LMRA),
    App. C.1: `hidden = [256, 256, 256]`, for the AT&T faces `[32, 32, 32]`, with `batch_norm` or
    without.

    Args:
        hidden: units of each hidden layer.
        batch_norm: normalise before each ReLU between layers.
        dropout: probability of dropping a hidden unit, in [0, 1).
        output_relu: ReLU after the last layer too, so that no logit is negative.
    """

    hidden: tuple[int, ...] = (200,)
    batch_norm: bool = False
    dropout: float = 0.0
    output_relu: bool = False

    def __post_init__(self) -> None:
        if min(self.hidden, default=1) < 1:
            raise ConfigError(f"hidden: expected layers of at least 1 unit, got {list(self.hidden)}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected a value in [0, 1), got {self.dropout}")

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
