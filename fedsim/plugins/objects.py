"""Objects of a Python program in the place of plug-ins: a network, a data set, a strategy, the class of an attack.

They stay in this process. An experiment file holds a name in their place, which no other program can turn into the
object again; `fedsim.workflow.objects` decides what needs that.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from fedsim.errors import ConfigError, PluginError

MARK = "python-object "
"""What the name of an object begins with in an experiment file."""


@dataclass(frozen=True, eq=False)
class Given:
    """An object that a program handed over; it is known by its name for as long as somebody holds this."""

    name: str
    thing: Any


_given: WeakValueDictionary[str, Given] = WeakValueDictionary()


def is_object(name: str) -> bool:
    """Whether `name`, in an experiment file, stands for an object of a Python program."""
    return name.startswith(MARK)


def is_gone(name: str) -> bool:
    """Whether `name` stands for an object that this program does not have."""
    return is_object(name) and name not in _given


def given(name: str, *, fresh: bool = False) -> Any:
    """The object that `name` stands for, or a fresh copy of it for whoever changes it.

    Raises:
        PluginError: it is of another program, or has gone.
    """
    found = _given.get(name)
    if found is None:
        raise PluginError(
            f"'{name}' was an object of the Python program that made this run, which no file holds; "
            "hand the object over again, or name another"
        )
    return deepcopy(found.thing) if fresh else found.thing


def hand_over(thing: Any) -> Given:
    """Have `thing` known by a name of its own.

    A class has the same name for as long as its source is the same; no two other objects have the same name.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    held = Given(f"{MARK}{kind.__name__} {_token(thing)}", thing)
    _given[held.name] = held
    return held


def _token(thing: Any) -> str:
    """Eight hexadecimal digits: of a class, out of its source where that is known, else drawn."""
    try:
        source = inspect.getsource(thing) if isinstance(thing, type) else ""
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()[:8] if source else secrets.token_hex(4)


class GivenModel:
    """Offers a network that a program handed over, with the weights that it had then."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def build(self, task: Any) -> Any:
        """See `fedsim.models.ModelPlugin`."""
        del task
        return deepcopy(self.network)


class GivenData:
    """Offers a data set that a program handed over."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def load(self, folder: Path | None) -> Any:
        """See `fedsim.datasets.DatasetPlugin`."""
        del folder
        return self.data


def plugin(group: str, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """What `fedsim.plugins.registry.build` returns for an object that is no class.

    Raises:
        ConfigError: settings are named, which an object has already.
        PluginError: the object is not there.
    """
    thing = given(name)
    if settings:
        raise ConfigError(f"{where}.{next(iter(settings))}: this is an object, which has its settings already")
    if group == "models":
        return GivenModel(thing)
    return GivenData(thing) if group == "datasets" else deepcopy(thing)
