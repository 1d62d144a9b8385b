"""Objects of a Python program in the tables of an experiment: some become names and settings, others stay objects.

An object that can be made again from a name and settings is written that way, and works on every
engine. Any other object stays in this process: only an engine that plays clients there can use it,
and a run made with it cannot be rebuilt from its file.
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

from fedsim.base.errors import ConfigError
from fedsim.federation.resolve import check_no_lost_none
from fedsim.plugins import registry
from fedsim.plugins.frozen import check_frozen, to_plain_value
from fedsim.plugins.inline import is_object, register_object

_TABLES: Mapping[str, registry.Group] = {
    "data": "datasets",
    "partition": "partitions",
    "model": "models",
    "strategy": "strategies",
    "algorithm": "algorithms",
}
_LISTS: Mapping[str, registry.Group] = {"attack": "attacks", "defense": "defenses", "measure": "measures"}


def replace_objects(tables: dict[str, Any]) -> None:
    """Replace the objects in `tables` by tables."""
    new_tables: dict[str, dict[str, Any]] = {}
    for key, group in _TABLES.items():
        if key in tables and not isinstance(tables[key], Mapping):
            tables[key] = new_tables[key] = as_table(group, tables[key], key)
    for key, group in _LISTS.items():
        for position, item in enumerate(tables[key] if isinstance(tables.get(key), list) else ()):
            if not isinstance(item, Mapping):
                where = f"{key}.{position}"
                tables[key][position] = new_tables[where] = as_table(group, item, where)
    for where, table in new_tables.items():
        if is_object(table["name"]):
            _check_stays_in_process(tables, where)


def name_objects(tables: dict[str, Any]) -> None:
    """Replace the objects in the tables of a sweep, those in values of axes too, by names and settings."""
    replace_objects(tables)
    _check_importable(tables, "sweep")
    sweep = tables.get("sweep")
    axes = sweep.get("axes") if isinstance(sweep, dict) else None
    for axis, values in axes.items() if isinstance(axes, dict) else ():
        for position, value in enumerate(values if isinstance(values, list) else ()):
            is_list_item = axis == "attack"
            holder: dict[str, Any] = {axis: [value] if is_list_item else value}
            replace_objects(holder)
            _check_importable(holder, f"sweep.axes: '{axis}'")
            values[position] = holder[axis][0] if is_list_item else holder[axis]


def _check_importable(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where the name of a table stands for an object of this process."""
    for name in (*_TABLES, *_LISTS):
        for table in tables[name] if isinstance(tables.get(name), list) else [tables.get(name)]:
            if isinstance(table, Mapping) and is_object(str(table.get("name", ""))):
                raise ConfigError(
                    f"{where}: {name}: cells run in other processes, which cannot get this object; put it in a module "
                    "of its own, where it can be imported by name"
                )


def _check_stays_in_process(tables: dict[str, Any], where: str) -> None:
    """Raise ConfigError where other processes would need the object at `where`; else attacks run in this one."""
    remedy = "put it in a separate module, where it can be imported by name"
    federation, adversary = tables.setdefault("federation", {}), tables.setdefault("adversary", {})
    if not isinstance(federation, dict) or not isinstance(adversary, dict):
        return  # the check of the tables reports this
    engine = federation.get("engine", "serial")
    name = engine.get("name") if isinstance(engine, Mapping) else engine
    if isinstance(name, str) and not registry.load("engines", name).in_process:
        raise ConfigError(
            f"federation.engine: '{name}' works in other processes, which cannot get the object at {where}; "
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


def as_table(group: registry.Group, thing: Any, where: str) -> dict[str, Any]:
    """Return the table of an experiment file that stands for `thing`.

    A dataclass, such as an attack or a defense, becomes its class and its settings. A network or a strategy is copied,
    so that the caller may go on using its own.
    """
    cls = type(thing)
    if dataclasses.is_dataclass(cls) and hasattr(cls, registry.PLUGIN_METHODS[group]):
        if group in _LISTS.values():
            check_frozen(cls)
        registered = registry.find_name(group, cls)
        table = {"name": registered or importable_name(cls) or register_object(cls), **_settings(thing, where)}
        if group == "attacks" and (title := vars(thing).get("_title") or (not registered and cls.__name__)):
            table["label"] = title
        return table
    if not isinstance(thing, _kind(group)):
        raise ConfigError(f"{where}: expected {_EXPECTED[group]}, got {cls.__name__}")
    return {"name": register_object(thing if group == "datasets" else deepcopy(thing))}


def _settings(thing: Any, where: str) -> dict[str, Any]:
    check_no_lost_none(thing, where)
    values = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return as_plain_values({key: value for key, value in values.items() if value is not None}, type(thing).__name__)


def _kind(group: registry.Group) -> type | tuple[type, ...]:
    """Return the type that an object in the place of a plug-in of `group` must have."""
    if group == "models":
        from torch import nn

        return nn.Module
    if group == "datasets":
        from fedsim.data import Dataset

        return Dataset
    return _Strategy if group == "strategies" else ()


@runtime_checkable
class _Strategy(Protocol):
    def aggregate_train(self, server_round: int, replies: Any) -> Any: ...


_EXPECTED: dict[registry.Group, str] = {
    "attacks": "a name, a table, or an instance of fedsim.Attack that is a dataclass",
    "defenses": "a table, or an instance of fedsim.Defense that is a dataclass",
    "measures": "a table, or an instance of fedsim.Measure that is a dataclass",
    "strategies": "a table, or a Flower strategy",
    "algorithms": "a table, or an instance of fedsim.ClientAlgorithm that is a dataclass",
    "datasets": "a table, or a fedsim.Dataset",
    "partitions": "a table, or a partition that is a dataclass",
    "models": "a table, or a torch.nn.Module",
}


def as_plain_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` as an experiment file would hold them."""
    plain_values = {}
    for key, value in values.items():
        try:
            plain_values[key] = json.loads(json.dumps(value, default=to_plain_value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: {key}: expected a number, a text or a list of them, got {type(value).__name__}"
            ) from error
    return plain_values


def importable_name(cls: type) -> str | None:
    """Return `module:Class`, by which every process finds `cls`; None for one of a notebook, a script or a function."""
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
