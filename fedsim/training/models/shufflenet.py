"""ShuffleNet V2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_CHANNELS: Mapping[float, tuple[int, int, int, int]] = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
_STEM_CHANNELS = 24
_UNITS_PER_STAGE = (4, 8, 4)


@dataclass(frozen=True, kw_only=True)
class ShuffleNetV2:
    """ShuffleNet V2 [Ma2018], which LAVP attacks on ImageNet.

    conv 3x3 of stride 2 - max pool - three stages of 4, 8 and 4 units, the first of stride 2 - conv
    1x1 - global average pool - linear: Table 5 and Fig. 3 (c) and (d) of the paper.

    Args:
        width: 0.5, 1, 1.5 or 2, the sizes of Table 5; LAVP does not say which it attacks.
    """

    width: float = 1.0

    def __post_init__(self) -> None:
        if self.width not in _CHANNELS:
            raise ConfigError(f"width: expected one of {', '.join(map(str, _CHANNELS))}, got {self.width}")

    def build(self, task: Task) -> nn.Module:
        """Build the network for images of at least 32 x 32: one pixel for the last pool."""
        depth, _, _ = image_shape(task, "shufflenet-v2", smallest=32)
        *stages, last = _CHANNELS[self.width]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=nn.Sequential(
                *_with_batch_norm(nn.Conv2d(depth, _STEM_CHANNELS, 3, stride=2, padding=1, bias=False)), nn.ReLU()
            ),
            stem_pool=nn.MaxPool2d(3, stride=2, padding=1),
        )
        before = _STEM_CHANNELS
        for number, (after, units) in enumerate(zip(stages, _UNITS_PER_STAGE, strict=True), start=2):
            first_unit = _DownsamplingUnit(before, after)
            further_units = [_BasicUnit(after) for _ in range(units - 1)]
            layers[f"stage{number}"] = nn.Sequential(first_unit, *further_units)
            before = after
        layers["last"] = nn.Sequential(*_pointwise_layers(before, last))
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["linear"] = nn.Linear(last, task.outputs)
        return nn.Sequential(layers)


class _BasicUnit(nn.Module):
    """Unit of Fig. 3 (c): half of the channels pass, the other half is convolved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_bottleneck_layers(channels // 2, channels // 2, stride=1))

    def forward(self, inputs: Tensor) -> Tensor:
        passing, convolved = inputs.chunk(2, dim=1)
        return _shuffle_channels(passing, self.branch(convolved))


class _DownsamplingUnit(nn.Module):
    """Unit of Fig. 3 (d): both branches get all channels and halve the image."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(*_depthwise_layers(before, stride=2), *_pointwise_layers(before, after // 2))
        self.branch = nn.Sequential(*_bottleneck_layers(before, after // 2, stride=2))

    def forward(self, inputs: Tensor) -> Tensor:
        return _shuffle_channels(self.shortcut(inputs), self.branch(inputs))


def _with_batch_norm(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels)]


def _pointwise_layers(before: int, after: int) -> list[nn.Module]:
    return [*_with_batch_norm(nn.Conv2d(before, after, 1, bias=False)), nn.ReLU()]


def _depthwise_layers(channels: int, *, stride: int) -> list[nn.Module]:
    return _with_batch_norm(nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False))


def _bottleneck_layers(before: int, after: int, *, stride: int) -> list[nn.Module]:
    return [
        *_pointwise_layers(before, after),
        *_depthwise_layers(after, stride=stride),
        *_pointwise_layers(after, after),
    ]


def _shuffle_channels(first: Tensor, second: Tensor) -> Tensor:
    """Interleave the channels of two tensors: `nn.ChannelShuffle(2)` of both, in one step."""
    return torch.stack((first, second), dim=2).flatten(1, 2)
