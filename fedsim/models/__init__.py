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
        raise unsuited(task, model, f"images of at least {smallest} x {smallest}")
    channels, height, width = task.input_shape
    return channels, height, width


def text_shape(task: Task, model: str, *, smallest: int) -> tuple[int, int]:
    """Tokens in one text of `task`, and how many different ones there are.

    Raises:
        ConfigError: `task` has no texts, or shorter ones than `model` can take.
    """
    if task.kind != "text" or task.input_shape[0] < smallest:
        raise unsuited(task, model, f"texts of at least {smallest} tokens")
    return task.input_shape[0], task.vocabulary


def flat_size(task: Task, model: str) -> int:
    """Numbers in one example of `task`.

    Raises:
        ConfigError: its examples are texts, whose tokens are indices, not quantities.
    """
    if task.kind == "text":
        raise unsuited(task, model, "numbers", "text-cnn")
    return math.prod(task.input_shape)


def unsuited(task: Task, model: str, takes: str, choose: str = "another model or data set") -> ConfigError:
    """The error to raise when `model` cannot be built for `task`: what it takes, what it got, what to do."""
    shape = " x ".join(map(str, task.input_shape))
    got = f"texts of {shape} tokens" if task.kind == "text" else f"inputs of shape {shape}"
    return ConfigError(f"model: {model} takes {takes}, got {got}; choose {choose}")
