"""The built-in modalities, one file each, and how a modality is found by its name."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedsim.base.errors import DataError, PluginError
from fedsim.base.task import Task, infer_modality
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.modality import Modality
from fedsim.plugins import registry


@cache
def find_modality(name: str) -> Modality:
    """Return the modality that is registered as `name`, or that is the class at `module:Class`.

    Raises:
        PluginError: there is none of this name, or it derives from another class than `Modality`.
    """
    modality: Any = registry.build("modalities", name, {}, "modality")
    if not isinstance(modality, Modality):
        raise PluginError(
            f"modalities: '{name}' is a {type(modality).__name__}, which does not derive from fedsim.Modality"
        )
    return modality


def check_modality(task: Task, name: str) -> None:
    """Raise DataError where a data set names an unknown modality, or has other axes than it.

    Args:
        task: what is learned from the data set.
        name: the data set's name in the experiment.
    """
    shape = "(example, " + ", ".join(map(str, task.input_shape)) + ")"
    if not task.modality:
        raise DataError(
            f"data: '{name}' names no modality, and none is known for inputs of shape {shape}; give its Dataset a "
            "modality, as modality='series'"
        )
    try:
        modality = find_modality(task.modality)
    except PluginError as error:
        raise DataError(f"data: '{name}' names the modality '{task.modality}', and {error}") from error
    if len(modality.axes) != len(task.input_shape):
        raise DataError(
            f"data: '{name}' has inputs of shape {shape}, but its modality '{task.modality}' has the axes "
            f"{', '.join(modality.axes)}; correct the arrays or the modality"
        )
    if modality.has_tokens != (task.vocabulary > 0):
        kinds = ("tokens", "numbers") if modality.has_tokens else ("numbers", "tokens")
        raise DataError(
            f"data: '{name}' is of modality '{task.modality}', whose inputs are {kinds[0]}, but it holds {kinds[1]}; "
            "correct the vocabulary or the modality"
        )


def known_modality(knowledge: Knowledge) -> str:
    """Return the name of the modality that an adversary knows, inferred where nobody named one."""
    return knowledge.modality or infer_modality(knowledge.input_shape or ())


def smooth_dimensions(name: str) -> tuple[int, ...]:
    """Return the dimensions of a batch along which neighbouring values are alike; the first is 1.

    >>> smooth_dimensions("image")
    (2, 3)
    """
    if not name:
        return ()
    modality = find_modality(name)
    return tuple(1 + modality.axes.index(axis) for axis in modality.smooth_axes)
