"""The network without skip connections of Inverting Gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_WIDTH_MULTIPLES = (1, 2, 2, 4, 4, 4, 4, 4)
_POOLED_LAYERS = (6, 8)
"""Numbers of the convolutions that a max pool follows."""


@dataclass(frozen=True, kw_only=True)
class ConvNet(CheckedSettings):
    """ConvNet of IG [Geiping2020] without skips, which the angular-Lipschitz paper attacks.

    Eight times conv 3x3 - batch norm - ReLU, with width x (1, 2, 2, 4, 4, 4, 4, 4) channels, a 3 x
    3 max pool after the sixth and the eighth; then one linear layer. IG's released code really
    builds this network: it lists a ninth convolution, but under a name that the dictionary of
    layers has already.

    Args:
        width: channels of the first convolution. IG's code sets 64 whenever its network is chosen
            by name, `ConvNet32` included; 32 is the default of its class.
    """

    width: PositiveInt = 32

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 9 x 9."""
        depth, height, width = image_shape(task, "convnet", smallest=9)
        layers: list[nn.Module] = []
        for number, multiple in enumerate(_WIDTH_MULTIPLES, start=1):
            channels = multiple * self.width
            layers += [nn.Conv2d(depth, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
            if number in _POOLED_LAYERS:
                layers.append(nn.MaxPool2d(3))
            depth = channels
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * (height // 9) * (width // 9), task.outputs))
