"""A small convolutional network for time series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen
from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.task import Task
from fedsim.training.models import series_shape

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


@dataclass(frozen=True, kw_only=True)
class Cnn1d(CheckedSettings):
    """Convolutions over time, each with stride 2 and an activation, then one linear layer.

    Args:
        channels: output channels of each convolution.
        kernel: times that a convolution covers; odd, so that each time is in the middle of one.
        activation: `relu`, or `sigmoid`, from whose gradients less can be read.
    """

    channels: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (16, 32)
    kernel: PositiveInt = 5
    activation: Literal["relu", "sigmoid"] = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel: expected an odd number, got {self.kernel}")

    def build(self, task: Task) -> nn.Module:
        """Build the network for series that are at least as long as the kernel."""
        depth, length = series_shape(task, "cnn-1d", smallest=self.kernel)
        layers: list[nn.Module] = []
        for channels in self.channels:
            layers.append(nn.Conv1d(depth, channels, self.kernel, stride=2, padding=self.kernel // 2))
            layers.append(_ACTIVATIONS[self.activation]())
            depth, length = channels, -(-length // 2)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * length, task.outputs))
