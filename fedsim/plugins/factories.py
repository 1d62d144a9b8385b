"""Models and data sets made by a user's function or network class in place of a plug-in."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from fedsim.base.errors import FedsimError, PluginError
from fedsim.base.task import Task
from fedsim.data import Dataset
from fedsim.data.files import describe_error
from fedsim.plugins.annotations import argument_types

RETURN_TYPES = {"models": "torch.nn.Module", "datasets": "fedsim.data.Dataset"}
"""The return type that such a function has to declare, by group."""
_TYPES: dict[str, type] = {"models": nn.Module, "datasets": Dataset}
_SUPPLIED_PARAMETERS = ("task", "folder")


def is_factory(factory: Any, group: str) -> bool:
    """Return whether `factory` is, or is declared to return, a product of `group`."""
    if inspect.isclass(factory):
        return issubclass(factory, _TYPES[group])
    if not inspect.isfunction(factory):
        return False
    try:
        return_type = get_type_hints(factory).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(return_type) and issubclass(return_type, _TYPES[group])


class FactoryPlugin:
    """Model or data set plug-in that calls a function with settings from the experiment file.

    A parameter called `task` (of a model) or `folder` (of a data set) is supplied by fedsim.
    """

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        self._function = function
        self._settings = settings

    @staticmethod
    def make_constructor(function: Callable[..., Any]) -> Callable[..., FactoryPlugin]:
        """Return a constructor that takes the settings of `function` as keywords."""

        def construct(**settings: Any) -> FactoryPlugin:
            return FactoryPlugin(function, settings)

        signature = inspect.signature(function)
        settings_parameters = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name not in _SUPPLIED_PARAMETERS
        ]
        construct.__signature__ = signature.replace(parameters=settings_parameters)  # type: ignore[attr-defined]
        construct.__annotations__ = argument_types(function)
        return construct

    def build(self, task: Task) -> Any:
        """Make the network, see `fedsim.training.models.ModelPlugin`."""
        return self._call_function("task", task)

    def load(self, folder: Path | None) -> Any:
        """Make the data set, see `fedsim.data.DatasetPlugin`."""
        return self._call_function("folder", folder)

    def _call_function(self, parameter: str, value: Any) -> Any:
        """Call the function with its settings, and with `value` if it has the `parameter`."""
        arguments = dict(self._settings)
        if parameter in inspect.signature(self._function).parameters:
            arguments[parameter] = value
        try:
            return self._function(**arguments)
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            name = f"{self._function.__module__}:{self._function.__qualname__}"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise PluginError(
                f"'{name}' fails, {describe_error(error)} ({frame.filename}, line {frame.lineno})"
            ) from error
