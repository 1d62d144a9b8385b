"""The CNN of surrogate model extension (SME)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.task import Task
from fedsim.training.models import image_shape


@dataclass(frozen=True, kw_only=True)
class SmeCnn(CheckedSettings):
    """Two convolutions and two fully connected layers, the CNN of SME [Zhu2023], App. D.

    conv 3x3 - ReLU - average pool 2 - conv 3x3 - ReLU - average pool 2 - linear - ReLU - linear.
    The defaults are the paper's net for 28 x 28 x 1 (FEMNIST); for 32 x 32 x 3 (CIFAR-100) it uses
    channels 64 and 128 and 200 hidden units. Sizes from the authors' released code; weights and
    biases keep torch's default initialisation, as there.

    Args:
        channels: output channels of the two convolutions.
        hidden: units of the first linear layer.
    """

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    hidden: PositiveInt = 100

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 4 x 4."""
        depth, height, width = image_shape(task, "sme-cnn", smallest=4)
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
            nn.Linear(self.hidden, task.outputs),
        )
