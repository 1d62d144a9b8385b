"""Validate tables, and say in one sentence which key of them is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.plugins.registry import explain_validation_error

_T = TypeVar("_T", bound=BaseModel)
TOO_DEEP = "is nested too deeply; settings are tables, lists and values in them"
"""Error text for a file whose tables are nested without end."""
_TITLED_LISTS = ("attack", "measure")
"""Lists of tables that have a title each."""


def validate_tables(kind: type[_T], tables: Mapping[str, Any], where: str) -> _T:
    """Validate `tables` as `kind`, turning the first error into one sentence."""
    try:
        text = json.dumps(tables)
    except TypeError as error:
        value_path, value = _find_unwritable(tables)
        key = ".".join(name_tables(value_path, tables))
        raise ConfigError(
            f"{where}: {key}: expected a number, a text, a list or a table, got {type(value).__name__}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: {TOO_DEEP}") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # `json.dumps` wrote it, so only its depth can be wrong
            raise ConfigError(f"{where}: {TOO_DEEP}") from error
        path, complaint = explain_validation_error(error, tables)
        if first["type"] == "extra_forbidden":
            known_keys = _field_names(kind, first["loc"][:-1])
            complaint = f"unknown key, {did_you_mean(path[-1], known_keys)}"
        elif first["type"] == "list_type" and isinstance(first["input"], dict) and len(path) == len(first["loc"]):
            complaint = f"this is a list of tables; write [[{path[-1]}]]"
        elif first["type"] == "bool_type" and len(path) > 2 and path[-1] in _field_names(kind, first["loc"][:-2]):
            # `adversary.knowledge.auxiliary` grants records, and `adversary.auxiliary` says how many.
            complaint += f"; true grants it, and {'.'.join([*path[:-2], path[-1]])} says how many"
        keys = [".".join(name_tables(path, tables))] if path else []
        raise ConfigError(": ".join([where, *keys, complaint])) from error


def name_tables(path: Sequence[str], tables: Mapping[str, Any]) -> list[str]:
    """Return the path of a key with the title of an attack or a measure in place of its number.

    `--set` names tables so. Where two tables have the same title, the number stays.
    """
    if len(path) < 3 or path[0] not in _TITLED_LISTS or path[2] in ("name", "label"):
        return list(path)
    titles = [_title(table) for table in tables[path[0]]]
    title = titles[int(path[1])]
    return [path[0], title if title and titles.count(title) == 1 else path[1], *path[2:]]


def _title(table: Any) -> str:
    """Return the name under which the results of a table are stored; '' where it is not known."""
    title = (table.get("label") or table.get("name")) if isinstance(table, Mapping) else None
    return title if isinstance(title, str) else ""


def _find_unwritable(value: Any, path: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """Return the path of the first value, and the value, that no experiment file can hold."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        try:
            json.dumps(inner)
        except TypeError:
            return _find_unwritable(inner, (*path, str(key)))
    return path, value


def _field_names(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at `path` within the table `kind`."""
    for key in path:
        field = kind.model_fields.get(str(key))
        if field is None:
            continue
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                kind = annotation
    return list(kind.model_fields)
