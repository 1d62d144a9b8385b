"""Networks in plain torch, one file a family, and the interface of a model plug-in."""

from __future__ import annotations

import math
from typing import Protocol

from torch import nn

from fedsim.base.errors import ConfigError
from fedsim.base.task import Task


class ModelPlugin(Protocol):
    """Interface of a model plug-in: a frozen dataclass whose fields are its settings."""

    def build(self, task: Task) -> nn.Module:
        """Build a network for the inputs of `task`, with `task.outputs` outputs an example."""
        ...


def image_shape(task: Task, model: str, *, smallest: int) -> tuple[int, int, int]:
    """Return `channel height width` of the images of `task`.

    Args:
        model: the model's name, for errors.
        smallest: the smallest height and width that the model accepts.

    Raises:
        ConfigError: `task` has no images, or smaller ones than `model` accepts.
    """
    if task.modality != "image" or min(task.input_shape[1:]) < smallest:
        raise task_mismatch(task, model, f"images of at least {smallest} x {smallest}")
    channels, height, width = task.input_shape
    return channels, height, width


def series_shape(task: Task, model: str, *, smallest: int) -> tuple[int, int]:
    """Return `channel time` of the series of `task`.

    Args:
        model: the model's name, for errors.
        smallest: the smallest number of times that the model accepts.

    Raises:
        ConfigError: `task` has no series, or shorter ones than `model` accepts.
    """
    if task.modality != "series" or task.input_shape[1] < smallest:
        raise task_mismatch(task, model, f"series of at least {smallest} times")
    channels, length = task.input_shape
    return channels, length


def text_shape(task: Task, model: str, *, smallest: int) -> tuple[int, int]:
    """Return the number of tokens in one text of `task`, and the size of the vocabulary.

    Args:
        model: the model's name, for errors.
        smallest: the smallest number of tokens that the model accepts.

    Raises:
        ConfigError: `task` has no texts, or shorter ones than `model` accepts.
    """
    if task.modality != "text" or task.input_shape[0] < smallest:
        raise task_mismatch(task, model, f"texts of at least {smallest} tokens")
    return task.input_shape[0], task.vocabulary


def input_size(task: Task, model: str) -> int:
    """Return how many numbers one example of `task` has.

    Raises:
        ConfigError: its examples are texts, whose tokens are indices, not quantities.
    """
    if task.vocabulary:
        raise task_mismatch(task, model, "numbers", "text-cnn")
    return math.prod(task.input_shape)


def task_mismatch(task: Task, model: str, takes: str, choose: str = "another model or data set") -> ConfigError:
    """Return the error to raise when a model cannot be built for a task.

    Args:
        model: the model's name.
        takes: the inputs that the model accepts.
    """
    shape = " x ".join(map(str, task.input_shape))
    got = f"texts of {shape} tokens" if task.vocabulary else f"inputs of shape {shape}"
    return ConfigError(f"model: {model} takes {takes}, got {got}; choose {choose}")
