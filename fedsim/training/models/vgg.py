"""VGG."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.task import Task
from fedsim.training.models import image_shape


@dataclass(frozen=True, kw_only=True)
class Vgg9(CheckedSettings):
    """VGG of nine layers after [Simonyan2014], which LAVP attacks.

    Six conv 3x3 with ReLU, a 2 x 2 max pool after every second; then linear - ReLU twice, and a
    last linear layer. LAVP names the network only. Sizes are those usual in federated learning,
    from the code of FedMA [Wang2020a]: 3 491 530 parameters with CIFAR-10. The dropout that they
    add is left out.

    Args:
        channels: output channels of the six convolutions.
        hidden: units of the first two linear layers.
        batch_norm: normalise after each convolution.
    """

    channels: tuple[
        PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt
    ] = (32, 64, 128, 128, 256, 256)  # fmt: skip
    hidden: tuple[PositiveInt, PositiveInt] = (512, 512)
    batch_norm: bool = False

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 8 x 8."""
        depth, height, width = image_shape(task, "vgg9", smallest=8)
        layers: list[nn.Module] = []
        for number, channels in enumerate(self.channels, start=1):
            layers.append(nn.Conv2d(depth, channels, 3, padding=1))
            if self.batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
            if number % 2 == 0:
                layers.append(nn.MaxPool2d(2))
            depth = channels
        layers.append(nn.Flatten())
        units = depth * (height // 8) * (width // 8)
        for hidden in self.hidden:
            layers += [nn.Linear(units, hidden), nn.ReLU()]
            units = hidden
        return nn.Sequential(*layers, nn.Linear(units, task.outputs))
