"""Small convolutional networks that go by the name of LeNet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.init import uniform_

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
_DLG_WEIGHT_BOUND = 0.5


@dataclass(frozen=True, kw_only=True)
class LeNet(CheckedSettings):
    """LeNet with average pooling of [LeCun1998] and SME, App. G, or the net of DLG.

    `classic`: conv 5x5, 6 - average pool - conv 5x5, 16 - average pool - linear 120 - 84 - outputs,
    tanh in between. Pools are 2 x 2 and padded by one pixel of zeros, as in SME's released code,
    which makes 400 features of 28 x 28 pixels. `dlg` [Zhu2019]: three conv 5x5 of 12 channels,
    padded by 2, strides 2, 2 and 1, sigmoid after each, one linear layer; all weights and biases
    are drawn from U(-0.5, 0.5). Other weights have torch's default initialisation.

    Args:
        layout: `classic` or `dlg`.
        activation: `tanh`, `sigmoid` or `relu`; by default tanh in `classic` and sigmoid in `dlg`.
        released: end in a softmax as SME's released code does; its output goes into the
            cross-entropy, which takes the softmax again. For `classic` and classes only.
    """

    layout: Literal["classic", "dlg"] = "classic"
    activation: Literal["tanh", "sigmoid", "relu"] | None = None
    released: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.released and self.layout != "classic":
            raise ConfigError(
                f"released: expected false with layout '{self.layout}', only 'classic' has such a variant"
            )

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 12 x 12, in layout `dlg` of any size."""
        return self._build_classic(task) if self.layout == "classic" else self._build_dlg(task)

    def _build_classic(self, task: Task) -> nn.Module:
        channels, height, width = image_shape(task, "lenet", smallest=12)
        if self.released and not task.num_classes:
            raise ConfigError(
                f"model: lenet with released = true takes classes, got {task.describe_goal()}; choose released = false"
            )
        activation = _ACTIVATIONS[self.activation or "tanh"]
        features = 16 * _side_after_pool(_side_after_pool(height)) * _side_after_pool(_side_after_pool(width))
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            activation(),
            nn.AvgPool2d(2, padding=1),
            nn.Conv2d(6, 16, 5),
            activation(),
            nn.AvgPool2d(2, padding=1),
            nn.Flatten(),
            nn.Linear(features, 120),
            activation(),
            nn.Linear(120, 84),
            activation(),
            nn.Linear(84, task.outputs),
            *([nn.Softmax(dim=1)] if self.released else []),
        )

    def _build_dlg(self, task: Task) -> nn.Module:
        channels, height, width = image_shape(task, "lenet", smallest=1)
        activation = _ACTIVATIONS[self.activation or "sigmoid"]
        layers: list[nn.Module] = []
        for stride in (2, 2, 1):
            layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), activation()]
            channels = 12
        features = 12 * -(-height // 4) * -(-width // 4)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, task.outputs))
        for parameter in model.parameters():
            uniform_(parameter, -_DLG_WEIGHT_BOUND, _DLG_WEIGHT_BOUND)
        return model


def _side_after_pool(side: int) -> int:
    """Return the side after a 5 x 5 convolution without padding and a 2 x 2 pool with padding."""
    return (side - 4) // 2 + 1


@dataclass(frozen=True, kw_only=True)
class TgiasLeNet(CheckedSettings):
    """LeNet-5 with ReLU and max pooling, of TGIAs-RO, Table XI.

    conv 5x5 - ReLU - max pool 2 - conv 5x5 - ReLU - max pool 2 - linear - ReLU - linear - ReLU -
    linear. The paper gives the layers and the kernel size, but no widths. LeNet-5's own (6 and 16
    channels, 120 and 84 units) fit the 5e4 parameters of its section 3.2.1: 44 426 with MNIST, 62
    006 with CIFAR-10.

    Args:
        channels: output channels of the two convolutions.
        hidden: units of the first two linear layers.
    """

    channels: tuple[PositiveInt, PositiveInt] = (6, 16)
    hidden: tuple[PositiveInt, PositiveInt] = (120, 84)

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 16 x 16."""
        channels, height, width = image_shape(task, "tgias-lenet", smallest=16)
        first, second = self.channels
        features = second * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
        return nn.Sequential(
            nn.Conv2d(channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(features, self.hidden[0]),
            nn.ReLU(),
            nn.Linear(self.hidden[0], self.hidden[1]),
            nn.ReLU(),
            nn.Linear(self.hidden[1], task.outputs),
        )
