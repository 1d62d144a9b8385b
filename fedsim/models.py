"""Networks by name, in plain torch. A model plug-in is a frozen dataclass with a `build` method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from fedsim.errors import ConfigError


class ModelPlugin(Protocol):
    """What a registered model offers."""

    def build(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """A network for inputs of `input_shape` (without the batch) with `num_classes` logits."""
        ...


@dataclass(frozen=True, kw_only=True)
class SmeCnn:
    """Two convolutions and two fully connected layers, the CNN of Zhu et al. 2023 (SME), App. D.

    conv 3x3 - ReLU - average pool 2 - conv 3x3 - ReLU - average pool 2 - linear - ReLU - linear.
    The defaults are the paper's net for 28 x 28 x 1 (FEMNIST); for 32 x 32 x 3 (CIFAR-100) it uses
    channels 64 and 128 and 200 hidden units. Sizes from the authors' released code; weights and
    biases keep torch's default initialisation, as there.

    Args:
        channels: output channels of the two convolutions.
        hidden: units of the first linear layer.
    """

    channels: tuple[int, int] = (32, 64)
    hidden: int = 100

    def __post_init__(self) -> None:
        if min(*self.channels, self.hidden) < 1:
            raise ConfigError(f"channels and hidden: expected at least 1 each, got {self.channels} and {self.hidden}")

    def build(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """See `ModelPlugin`. `input_shape` is `channel height width`, at least 4 x 4."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise ConfigError(
                f"model: sme-cnn takes images of at least 4 x 4, got inputs of shape {tuple(input_shape)}"
            )
        depth, height, width = input_shape
        first, second = self.channels
        return nn.Sequential(
            nn.Conv2d(depth, first, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (height // 4) * (width // 4), self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, num_classes),
        )


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A fully connected network with ReLU between its layers and none after the last.

    Args:
        hidden: units of each hidden layer.
        batch_norm: normalise before each ReLU.
        dropout: probability of dropping a hidden unit, in [0, 1).
    """

    hidden: tuple[int, ...] = (200,)
    batch_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.hidden, default=1) < 1:
            raise ConfigError(f"hidden: expected layers of at least 1 unit, got {list(self.hidden)}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected a value in [0, 1), got {self.dropout}")

    def build(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """See `ModelPlugin`. Inputs of any shape are flattened."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for units in self.hidden:
            layers.append(nn.Linear(width, units))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(nn.ReLU())
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            width = units
        return nn.Sequential(*layers, nn.Linear(width, num_classes))
