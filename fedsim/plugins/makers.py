"""A user's function, or network class, in the place of a model or data set plug-in."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from fedsim.datasets import Dataset
from fedsim.datasets.files import reason
from fedsim.errors import FedsimError, PluginError
from fedsim.plugins.annotations import hints
from fedsim.task import Task

PRODUCTS = {"models": "torch.nn.Module", "datasets": "fedsim.datasets.Dataset"}
"""What a function has to say that it returns, by group."""
_TYPES: dict[str, type] = {"models": nn.Module, "datasets": Dataset}
_GIVEN = ("task", "folder")


def makes(thing: Any, group: str) -> bool:
    """Whether calling `thing` gives what a plug-in of `group` gives, by its own account."""
    if inspect.isclass(thing):
        return issubclass(thing, _TYPES[group])
    if not inspect.isfunction(thing):
        return False
    try:
        returned = get_type_hints(thing).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(returned) and issubclass(returned, _TYPES[group])


class Maker:
    """Offers `build` and `load` by calling a function with settings from the experiment file.

    A parameter called `task` (of a model) or `folder` (of a data set) is filled in.
    """

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        self._function = function
        self._settings = settings

    @staticmethod
    def of(function: Callable[..., Any]) -> Callable[..., Maker]:
        """A constructor of makers that takes the settings of `function` as keywords."""

        def construct(**settings: Any) -> Maker:
            return Maker(function, settings)

        signature = inspect.signature(function)
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in _GIVEN]
        construct.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        construct.__annotations__ = hints(function)
        return construct

    def build(self, task: Task) -> Any:
        """See `fedsim.models.ModelPlugin`."""
        return self._call("task", task)

    def load(self, folder: Path | None) -> Any:
        """See `fedsim.datasets.DatasetPlugin`."""
        return self._call("folder", folder)

    def _call(self, given: str, value: Any) -> Any:
        wanted = given in inspect.signature(self._function).parameters
        try:
            return self._function(**self._settings, **({given: value} if wanted else {}))
        except FedsimError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # a user's code; what it raises is its fault to mend, not one of fedsim
            name = f"{self._function.__module__}:{self._function.__qualname__}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise PluginError(f"'{name}' fails, {reason(error)} ({place.filename}, line {place.lineno})") from error
