"""Networks by name, in plain torch, one file a family; and the interface of a plug-in."""

from __future__ import annotations

import math
from typing import Protocol

from torch import nn

from fedsim.errors import ConfigError
from fedsim.task import Task


class ModelPlugin(Protocol):
    """What a registered model offers: a frozen dataclass whose fields are its settings."""

    def build(self, task: Task) -> nn.Module:
        """A network for the inputs of `task`, with `task.outputs` outputs an example."""
        ...


def image_shape(task: Task, model: str, *, smallest: int) -> tuple[int, int, int]:
    """`channel height width` of the images of `task`.

    Raises:
        ConfigError: `task` has no images, or smaller ones than `model` can take.
    """
    if task.kind != "image" or min(task.input_shape[1:]) < smallest:
        raise ConfigError(
            f"model: {model} takes images of at least {smallest} x {smallest}, got {_described(task)}; "
            "choose another model or data set"
        )
    channels, height, width = task.input_shape
    return channels, height, width


def flat_size(task: Task, model: str) -> int:
    """Numbers in one example of `task`.

    Raises:
        ConfigError: its examples are texts, whose tokens are no numbers to reckon with.
    """
    if task.kind == "text":
        raise ConfigError(f"model: {model} takes numbers, got {_described(task)}; choose text-cnn")
    return math.prod(task.input_shape)


def _described(task: Task) -> str:
    shape = " x ".join(map(str, task.input_shape))
    return f"texts of {shape} tokens" if task.kind == "text" else f"inputs of shape {shape}"
