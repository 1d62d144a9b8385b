"""A small network that names the class of each pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.papers import Paper, cite
from fedsim.base.task import Task
from fedsim.training.models import image_shape

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


@dataclass(frozen=True, kw_only=True)
class UNet(CheckedSettings):
    """Convolutions down to a coarse image and up again, each finer level joined with what came down at it.

    It is for segmentation: a 1 x 1 convolution at the end gives the logits of each pixel.

    Args:
        channels: of each level, from the finest; one level more halves the sides once more.
        activation: after each convolution; `sigmoid`, or `relu`, from whose gradients more examples are told apart.

    References:
        [Ronneberger2015]. Differs: one convolution a level, padded; levels go up by the nearest pixel, not by a
        transposed convolution; no dropout.
    """

    channels: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (8, 16)
    activation: Literal["relu", "sigmoid"] = "relu"

    paper: ClassVar[Paper] = cite("Ronneberger2015")

    def build(self, task: Task) -> nn.Module:
        """Build the network for masks of images whose sides can be halved as often as there are levels."""
        if task.goal != "masks":
            raise ConfigError(
                f"model: u-net takes masks of images, got {task.describe_goal()}; choose another model, or data with "
                "masks"
            )
        depth, _, _ = image_shape(task, "u-net", smallest=2 ** (len(self.channels) - 1))
        return _Network(depth, self.channels, _ACTIVATIONS[self.activation], task.outputs)


class _Network(nn.Module):
    """The layers of `UNet`; takes `example channel height width` and gives `example class height width`."""

    def __init__(self, depth: int, channels: Sequence[int], activation: type[nn.Module], classes: int) -> None:
        super().__init__()
        inputs = [depth, *channels[:-1]]
        self.down = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in zip(inputs, channels, strict=True)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(coarse + fine, fine, 3, padding=1)
            for coarse, fine in reversed(list(zip(channels[1:], channels[:-1], strict=True)))
        )
        self.activation = activation()
        self.last = nn.Conv2d(channels[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        features, levels = images, list[Tensor]()
        for level, convolution in enumerate(self.down):
            features = self.activation(convolution(max_pool2d(features, 2) if level else features))
            levels.append(features)
        for convolution, fine in zip(self.up, reversed(levels[:-1]), strict=True):
            raised = interpolate(features, size=fine.shape[2:], mode="nearest")
            features = self.activation(convolution(torch.cat([raised, fine], 1)))
        logits: Tensor = self.last(features)
        return logits
