"""Inline plug-ins: objects of a Python program, such as a network or a class of attacks.

They are registered until the process ends. An experiment file refers to them by a generated name,
which no other program can resolve; `fedsim.api.objects` decides which objects need one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError, PluginError

OBJECT_PREFIX = "python-object "
"""Prefix of the generated names."""


_objects: dict[str, Any] = {}
"""Objects by name. They stay until the program ends, so that runs can be resumed and attacked."""
_content_hashes: dict[str, str] = {}
"""SHA-256 of the tensors of each data set when it was registered; a copy might be too large."""


def is_object(name: str) -> bool:
    """Return whether `name`, in an experiment file, stands for an object of a Python program."""
    return name.startswith(OBJECT_PREFIX)


def is_lost_object(name: str) -> bool:
    """Return whether `name` stands for an object that is not registered in this process."""
    return is_object(name) and name not in _objects


def find_object(name: str, *, fresh: bool = False) -> Any:
    """Return the object registered as `name`, or a copy of it if `fresh`.

    Raises:
        PluginError: it was registered by another program.
    """
    if name not in _objects:
        raise PluginError(
            f"'{name}' was an object of the Python program that made this run, which no file holds; "
            "hand the object over again, or name another"
        )
    return deepcopy(_objects[name]) if fresh else _objects[name]


def register_object(obj: Any) -> str:
    """Register `obj` until the program ends and return its new name.

    A class that is registered again keeps its name. Another class never gets that name, even if it
    has the same source.
    """
    cls = obj if isinstance(obj, type) else type(obj)
    if isinstance(obj, type):
        for name, registered in _objects.items():
            if registered is obj:
                return name
    name = f"{OBJECT_PREFIX}{cls.__name__} {secrets.token_hex(4)}"
    _objects[name] = obj
    if (content_hash := _hash_content(obj)) is not None:
        _content_hashes[name] = content_hash
    return name


def _hash_content(obj: Any) -> str | None:
    """Return the SHA-256 of the tensors of a data set; None for other objects."""
    from fedsim.data import Dataset  # imported here: it loads torch

    if not isinstance(obj, Dataset):
        return None
    hashes = []
    for examples in (obj.train, obj.test):
        for tensor in (examples.raw, examples.labels, examples.groups):
            if tensor is not None:
                content = tensor.detach().cpu().contiguous().numpy().tobytes()
                hashes.append(hashlib.sha256(content).digest())
    return hashlib.sha256(b"".join(hashes)).hexdigest()


class InlineModel:
    """Model plug-in that returns copies of a network, with the weights that it has."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def build(self, task: Any) -> Any:
        """Copy the network, see `fedsim.training.models.ModelPlugin`."""
        del task
        return deepcopy(self.network)


class InlineDataset:
    """Data set plug-in that returns an object, unless it was changed after it was registered."""

    def __init__(self, name: str, data: Any) -> None:
        self.name = name
        self.data = data

    def load(self, folder: Path | None) -> Any:
        """Return the data set, see `fedsim.data.DatasetPlugin`.

        Raises:
            PluginError: its tensors have changed since it was registered.
        """
        del folder
        if _hash_content(self.data) != _content_hashes[self.name]:
            raise PluginError(
                f"'{self.name}': the tensors of this data set were changed after it was handed over, so scores would "
                "be of other data than the run; hand a copy over and change that, or make another run"
            )
        return self.data


def build_inline_plugin(group: str, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """Return the plug-in for a registered object that is no class.

    Raises:
        ConfigError: there are settings, which an object has already.
        PluginError: the object is not registered.
    """
    obj = find_object(name)
    if settings:
        raise ConfigError(f"{where}.{next(iter(settings))}: this is an object, which has its settings already")
    if group == "models":
        return InlineModel(obj)
    if group == "datasets":
        return InlineDataset(name, obj)
    return deepcopy(obj)
