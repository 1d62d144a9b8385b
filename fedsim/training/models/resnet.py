"""Residual networks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveInt
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_LARGE_SIDE = 64
"""Side in pixels from which `stem = "auto"` chooses ImageNet's stem."""


def _convolution(before: int, after: int, *, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    # A batch norm always follows, which makes a bias superfluous.
    return nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)


class _BasicBlock(nn.Module):
    """Block of [He2016a]: the sum of two normalised convolutions and a shortcut, then ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(before, after, stride=stride), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = _convolution(after, after), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(_convolution(before, after, kernel=1, stride=stride), nn.BatchNorm2d(after))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(inputs)))))
        return relu(inner + self.shortcut(inputs))


class _PreActBlock(nn.Module):
    """Block of [He2016b]: batch norm and ReLU before each convolution, none at the end."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), _convolution(before, after, stride=stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), _convolution(after, after)
        self.shortcut: nn.Module | None = None
        if stride != 1 or before != after:
            self.shortcut = _convolution(before, after, kernel=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        active = relu(self.norm1(inputs))
        inner: Tensor = self.conv2(relu(self.norm2(self.conv1(active))))
        # A shortcut with weights starts from the activated inputs, one without from the inputs.
        return inner + (inputs if self.shortcut is None else self.shortcut(active))


def _stem(depth: int, channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [_convolution(depth, channels, kernel=kernel, stride=stride), nn.BatchNorm2d(channels), nn.ReLU()]


@dataclass(frozen=True, kw_only=True)
class ResNet18(CheckedSettings):
    """ResNet18 [He2016a], which the angular-Lipschitz paper, LAVP and TGIAs-RO attack.

    A stem, four stages of two blocks with 64, 128, 256 and 512 channels, strides 1, 2, 2 and 2, a
    global average pool and one linear layer.

    Args:
        width: factor of all channels; 2 and 4 give ResNet18-2 and ResNet18-4 of the
            angular-Lipschitz paper.
        channels: channels of the first stage before that factor; with less than 64 a small machine
            can train the network.
        stem: `imagenet` is conv 7x7 of stride 2, batch norm, ReLU and 3 x 3 max pool of stride 2;
            `cifar` conv 3x3, batch norm and ReLU; `auto` takes `cifar` for images below 64 x 64.
        preact: blocks with pre-activation [He2016b] as in GradAttack's ResNet18, whose stem keeps
            its batch norm and ReLU, and which has none after the last block.
    """

    width: PositiveInt = 1
    channels: PositiveInt = 64
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    preact: bool = False

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 8 x 8, with stem `imagenet` 32 x 32."""
        depth, height, width = image_shape(task, "resnet18", smallest=32 if self.stem == "imagenet" else 8)
        channels = self.channels * self.width
        if self.stem == "imagenet" or (self.stem == "auto" and min(height, width) >= _LARGE_SIDE):
            stem = [*_stem(depth, channels, 7, 2), nn.MaxPool2d(3, stride=2, padding=1)]
        else:
            stem = _stem(depth, channels, 3, 1)
        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*stem))
        block = _PreActBlock if self.preact else _BasicBlock
        before = channels
        for number in range(4):
            after = channels * 2**number
            layers[f"stage{number + 1}"] = nn.Sequential(
                block(before, after, 1 if number == 0 else 2), block(after, after, 1)
            )
            before = after
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["linear"] = nn.Linear(before, task.outputs)
        return nn.Sequential(layers)


@dataclass(frozen=True, kw_only=True)
class ResNet8(CheckedSettings):
    """ResNet8 with one block a stage, of SME, App. G; with other settings that of LAVP.

    conv 3x3 - batch norm - ReLU, three blocks with strides 1, 2 and 2, a pool and linear layers
    without anything in between. The defaults are SME's released code. LAVP only says
    "ResNet8" and cites [He2016a]: by that paper's rule of 6n + 2 layers it is `channels = [16, 32,
    64]`, `pool = "global"`, `hidden = 0`, with 78 042 parameters for CIFAR-10.

    Args:
        channels: output channels of the three blocks; the stem has as many as the first.
        pool: `padded` is a 2 x 2 average pool with one pixel of zeros around, `global` the mean of
            each channel.
        hidden: units of a linear layer before the last; 0 for none.
    """

    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (32, 64, 128)
    pool: Literal["padded", "global"] = "padded"
    hidden: NonNegativeInt = 1000

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 4 x 4."""
        depth, height, width = image_shape(task, "resnet8", smallest=4)
        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*_stem(depth, self.channels[0], 3, 1)))
        before = self.channels[0]
        for number, (after, stride) in enumerate(zip(self.channels, (1, 2, 2), strict=True), start=1):
            layers[f"block{number}"] = _BasicBlock(before, after, stride)
            before = after
        if self.pool == "global":
            layers["pool"], units = nn.AdaptiveAvgPool2d(1), before
        else:
            layers["pool"] = nn.AvgPool2d(2, padding=1)
            units = before * _side_after_pool(-(-height // 4)) * _side_after_pool(-(-width // 4))
        layers["flatten"] = nn.Flatten()
        if self.hidden:
            layers["hidden"] = nn.Linear(units, self.hidden)
        layers["linear"] = nn.Linear(self.hidden or units, task.outputs)
        return nn.Sequential(layers)


def _side_after_pool(side: int) -> int:
    """Return the side in pixels after a 2 x 2 pool with padding."""
    return side // 2 + 1
