"""Objects of a Python program in the place of plug-ins: a network, a data set, a strategy, the class of an attack.

They stay in this process, until it ends. An experiment file holds a name in their place, which no other program can
turn into the object again; `fedsim.workflow.objects` decides what needs that.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError, PluginError

MARK = "python-object "
"""What the name of an object begins with in an experiment file."""


_given: dict[str, Any] = {}
"""Objects by name, kept until the program ends: a run that failed can be resumed, and any run can be attacked."""
_contents: dict[str, str] = {}
"""By name, SHA-256 of the tensors of a data set when it was handed over; it is not copied, because it may be large."""


def is_object(name: str) -> bool:
    """Whether `name`, in an experiment file, stands for an object of a Python program."""
    return name.startswith(MARK)


def is_gone(name: str) -> bool:
    """Whether `name` stands for an object that this program does not have."""
    return is_object(name) and name not in _given


def given(name: str, *, fresh: bool = False) -> Any:
    """The object that `name` stands for, or a fresh copy of it, which may be changed.

    Raises:
        PluginError: it is of another program.
    """
    if name not in _given:
        raise PluginError(
            f"'{name}' was an object of the Python program that made this run, which no file holds; "
            "hand the object over again, or name another"
        )
    return deepcopy(_given[name]) if fresh else _given[name]


def hand_over(thing: Any) -> str:
    """Have `thing` known by a name of its own until the program ends.

    A class that is handed over again keeps its name; another class never gets it, even if it has the same source.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    if isinstance(thing, type):
        for name, known in _given.items():
            if known is thing:
                return name
    name = f"{MARK}{kind.__name__} {secrets.token_hex(4)}"
    _given[name] = thing
    if (content := _content(thing)) is not None:
        _contents[name] = content
    return name


def _content(thing: Any) -> str | None:
    """SHA-256 of the tensors of a data set; None for anything else."""
    from fedsim.datasets import Dataset  # which takes torch

    if not isinstance(thing, Dataset):
        return None
    parts = (thing.train, thing.test)
    tensors = [t for part in parts for t in (part.raw, part.labels, part.groups) if t is not None]
    hashes = [hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).digest() for tensor in tensors]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


class GivenModel:
    """Offers a network that a program handed over, with the weights that it had then."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def build(self, task: Any) -> Any:
        """See `fedsim.models.ModelPlugin`."""
        del task
        return deepcopy(self.network)


class GivenData:
    """Offers a data set that a program handed over, unless the program has changed it since."""

    def __init__(self, name: str, data: Any) -> None:
        self.name = name
        self.data = data

    def load(self, folder: Path | None) -> Any:
        """See `fedsim.datasets.DatasetPlugin`.

        Raises:
            PluginError: its tensors are not those that were handed over.
        """
        del folder
        if _content(self.data) != _contents[self.name]:
            raise PluginError(
                f"'{self.name}': the tensors of this data set were changed after it was handed over, so scores would "
                "be of other data than the run; hand a copy over and change that, or make another run"
            )
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
    return GivenData(name, thing) if group == "datasets" else deepcopy(thing)
