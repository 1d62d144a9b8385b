"""AlexNet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedsim.base.constraints import CheckedSettings, PositiveInt, ShareBelowOne
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_LARGE_SIDE = 128
"""Side in pixels from which images are large."""


@dataclass(frozen=True, kw_only=True)
class AlexNet(CheckedSettings):
    """AlexNet with 3x3 convolutions and batch normalisation, of TGIAs-RO, Table XI.

    Five times conv 3x3 - batch norm - ReLU, a 2 x 2 max pool after all of them but the fourth; then
    dropout - linear - ReLU twice, and a last linear layer: 5 convolutions, 7 ReLU, 4 max pools, 2
    dropout layers and 3 linear ones, as the table counts them. The paper speaks of one AlexNet for
    CIFAR and one for ImageNet, but gives no widths or strides, and not where the pools are.
    Channels are those of torchvision's AlexNet [Krizhevsky2014]. Images of 128 x 128 and more have
    Krizhevsky's stride of 4 and 4096 units. Smaller ones have stride 1, so that something is left
    to pool, and 1024 units, as many as features of a CIFAR image.

    The vanilla "6-layer AlexNet" of App. B.6 is five convolutions and one linear layer:
    `batch_norm = false`, `hidden = []`. The paper does not say where it has ReLUs; here they stay.

    Args:
        channels: output channels of the five convolutions.
        hidden: units of each hidden linear layer; by default two of 4096, or of 1024 for small
            images.
        stride: stride of the first convolution; by default 4, or 1 for small images.
        batch_norm: normalise after each convolution.
        dropout: probability of dropping an input of a hidden linear layer, in [0, 1); 0.5 is
            Krizhevsky's. TGIAs-RO attacks the network in evaluation mode.
    """

    channels: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (64, 192, 384, 256, 256)
    hidden: tuple[PositiveInt, ...] | None = None
    stride: PositiveInt | None = None
    batch_norm: bool = True
    dropout: ShareBelowOne = 0.5

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 16 x 16 with stride 1, 61 x 61 with stride 4."""
        is_large = task.modality == "image" and min(task.input_shape[1:]) >= _LARGE_SIDE
        stride = self.stride or (4 if is_large else 1)
        depth, height, width = image_shape(task, "alexnet", smallest=15 * stride + 1)
        layers: list[nn.Module] = []
        for number, channels in enumerate(self.channels, start=1):
            layers.append(nn.Conv2d(depth, channels, 3, stride=stride if number == 1 else 1, padding=1))
            if self.batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
            if number != 4:
                layers.append(nn.MaxPool2d(2))
            depth = channels
        layers.append(nn.Flatten())
        # The first convolution divides the sides by its stride, the four pools by 16.
        units = depth * (((height - 1) // stride + 1) // 16) * (((width - 1) // stride + 1) // 16)
        default_hidden = (4096, 4096) if is_large else (1024, 1024)
        for hidden in default_hidden if self.hidden is None else self.hidden:
            layers += [nn.Dropout(self.dropout), nn.Linear(units, hidden), nn.ReLU()]
            units = hidden
        return nn.Sequential(*layers, nn.Linear(units, task.outputs))
