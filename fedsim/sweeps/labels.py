"""Short labels for the values of an axis, used in tables, pictures and exclusions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.base.grouping import group_by

NONE = "none"
"""Label of an empty list: no defense, no measure."""


def label_values(values: Sequence[Any]) -> list[str]:
    """Return a label for each of `values`.

    The label of a table is its `label`, or else its name with the settings in which it differs from
    other values of the same name; without a name, all settings. The label of a list joins those of
    its tables, and any other value is its own label.

    >>> label_values([{"name": "dp-sgd", "clip": 1.0}, {"name": "dp-sgd", "clip": 2.0}, []])
    ['dp-sgd clip=1.0', 'dp-sgd clip=2.0', 'none']
    """
    table_lists = [_tables(value) for value in values]
    lists_by_titles = group_by((tables for tables in table_lists if tables is not None), _titles)
    result: list[str] = []
    for value, tables in zip(values, table_lists, strict=True):
        if tables is None:
            result.append(_format_value(value))
        else:
            result.append(_label_tables(tables, lists_by_titles[_titles(tables)]))
    return result


def _tables(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the tables that a value consists of; None where it is something else."""
    if isinstance(value, Mapping):
        return [value]
    return value if isinstance(value, list) and all(isinstance(item, Mapping) for item in value) else None


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _titles(tables: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(table.get("label") or table.get("name") or "") for table in tables)


def _label_tables(tables: Sequence[Mapping[str, Any]], same_titles: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return the titles of `tables`, each with the settings that differ among `same_titles`."""
    words: list[str] = []
    for index, (title, table) in enumerate(zip(_titles(tables), tables, strict=True)):
        counterparts = [other_tables[index] for other_tables in same_titles]
        keys = dict.fromkeys(key for other in counterparts for key in other if key not in ("name", "label"))
        settings: list[str] = []
        for key in keys:
            differs = any(key not in other or other[key] != table.get(key) for other in counterparts)
            if key in table and (not title or differs):
                settings.append(f"{key}={_format_value(table[key])}")
        words.append(" ".join(filter(None, (title, *settings))))
    return " + ".join(filter(None, words)) or NONE
