"""Objects of a Python program in the tables of an experiment: some become names and settings, others stay objects.

An object that can be made again from a name and settings is written that way, and works on every engine. Any other
object stays in this process: only engine `serial` can use it, and a run made with it cannot be rebuilt from its file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedsim.errors import ConfigError
from fedsim.plugins import registry
from fedsim.plugins.objects import Given, hand_over

_TABLES: Mapping[str, registry.Group] = {
    "data": "datasets",
    "partition": "partitions",
    "model": "models",
    "strategy": "strategies",
}
_LISTS: Mapping[str, registry.Group] = {"attack": "attacks", "defense": "defenses"}


def replaced(tables: dict[str, Any]) -> list[Given]:
    """Replace the objects in `tables` by tables.

    Returns:
        References to the objects, which the caller has to keep for as long as the tables are used.

    Raises:
        ConfigError: an object is not of the kind that belongs there; or it has to stay in this process, and the tables
            name another engine than `serial`, attacks in the round, or several workers.
    """
    held: dict[str, Given] = {}
    for name, group in _TABLES.items():
        if name in tables and not isinstance(tables[name], Mapping):
            tables[name], needed = as_table(group, tables[name], name)
            held |= {name: needed} if needed else {}
    for name, group in _LISTS.items():
        for place, item in enumerate(tables[name] if isinstance(tables.get(name), list) else ()):
            if not isinstance(item, Mapping):
                tables[name][place], needed = as_table(group, item, f"{name}.{place}")
                held |= {f"{name}.{place}": needed} if needed else {}
    for where in held:
        _check_carried(tables, where)
    return list(held.values())


def _check_carried(tables: dict[str, Any], where: str) -> None:
    """Raise ConfigError where other processes would need the object at `where`; else attacks run in this one."""
    remedy = "put it in a module of its own, where it can be imported by name"
    federation, adversary = tables.setdefault("federation", {}), tables.setdefault("adversary", {})
    if not isinstance(federation, dict) or not isinstance(adversary, dict):
        return  # the check of the tables reports this
    if (engine := federation.get("engine", "serial")) != "serial":
        raise ConfigError(
            f"federation.engine: '{engine}' works in other processes, which cannot get the object at {where}; "
            f"use engine 'serial', or {remedy}"
        )
    if adversary.get("when") == "in-round":
        raise ConfigError(
            f"adversary.when: 'in-round' attacks in another process, which cannot get the object at {where}; "
            f"use 'at-end', or {remedy}"
        )
    if adversary.setdefault("workers", 1) != 1:
        raise ConfigError(
            f"adversary.workers: other processes cannot get the object at {where}; leave this out, or {remedy}"
        )


def as_table(group: registry.Group, thing: Any, where: str) -> tuple[dict[str, Any], Given | None]:
    """The table of an experiment file that stands for `thing`, and a reference to keep while the table is used.

    A plug-in that is a dataclass, such as an attack or a defense, becomes its class and its settings. A network or a
    strategy is copied, so that the caller may go on using its own.

    Raises:
        ConfigError: it is no object of this group, or has a setting that cannot be written in an experiment file.
    """
    cls = type(thing)
    if dataclasses.is_dataclass(cls) and hasattr(cls, registry.OFFERS[group]):
        reference = registry.name_of(group, cls) or importable(cls)
        held = None if reference else hand_over(cls)
        table = {"name": held.name if held else reference, **_settings(thing)}
        if group == "attacks" and ":" in str(reference or ":"):
            table["label"] = cls.__name__
        return table, held
    if not isinstance(thing, _kind(group)):
        raise ConfigError(f"{where}: expected {_EXPECTED[group]}, got {cls.__name__}")
    held = hand_over(thing if group == "datasets" else deepcopy(thing))
    return {"name": held.name}, held


def _settings(thing: Any) -> dict[str, Any]:
    found = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return writable({key: value for key, value in found.items() if value is not None}, type(thing).__name__)


def _kind(group: registry.Group) -> type | tuple[type, ...]:
    """The type that an object in the place of a plug-in of `group` must have."""
    if group == "models":
        from torch import nn

        return nn.Module
    if group == "datasets":
        from fedsim.datasets import Dataset

        return Dataset
    return _Strategy if group == "strategies" else ()


@runtime_checkable
class _Strategy(Protocol):
    def aggregate_train(self, server_round: int, replies: Any) -> Any: ...


_EXPECTED: dict[registry.Group, str] = {
    "attacks": "a name, a table, or an instance of fedsim.Attack that is a dataclass",
    "defenses": "a table, or an instance of fedsim.Defense that is a dataclass",
    "strategies": "a table, or a Flower strategy",
    "datasets": "a table, or a fedsim.Dataset",
    "partitions": "a table, or a partition that is a dataclass",
    "models": "a table, or a torch.nn.Module",
}


def plain(value: Any) -> Any:
    """A number of NumPy, as the data frames of a run hold them, as one of Python; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def writable(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values` as an experiment file would hold them.

    Raises:
        ConfigError: one is neither a number nor a text, nor a list of them.
    """
    found = {}
    for key, value in values.items():
        try:
            found[key] = json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: {key}: expected a number, a text or a list of them, got {type(value).__name__}"
            ) from error
    return found


def importable(cls: type) -> str | None:
    """`module:Class`, by which every process finds `cls`; None if it is of a notebook, a script or a function."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" or not file or "." in cls.__qualname__:
        return None
    try:
        spec = find_spec(cls.__module__)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return None
    return f"{cls.__module__}:{cls.__name__}" if getattr(module, cls.__name__, None) is cls else None
