"""Short names for the values of an axis, by which tables, pictures and exclusions know them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"
"""What an empty list is called: no defense, no measure."""


def labels(values: Sequence[Any]) -> list[str]:
    """A label for each of `values`.

    Of a table it is its `label`, or else its name, with the settings in which it differs from other values that would
    be called the same, or with all if it has no name; of a list of tables those of all of them; of any other value the
    value itself.
    """
    tables = [_tables(value) for value in values]
    alike: dict[tuple[str, ...], list[Sequence[Mapping[str, Any]]]] = defaultdict(list)
    for found in tables:
        if found is not None:
            alike[_titles(found)].append(found)
    return [
        _plain(value) if found is None else _told(found, alike[_titles(found)])
        for value, found in zip(values, tables, strict=True)
    ]


def _tables(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """The tables that a value is, or is made of; None where it is something else."""
    if isinstance(value, Mapping):
        return [value]
    return value if isinstance(value, list) and all(isinstance(item, Mapping) for item in value) else None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _titles(tables: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(table.get("label") or table.get("name") or "") for table in tables)


def _told(tables: Sequence[Mapping[str, Any]], others: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The titles of `tables`, each with the settings that are not the same in all of `others`."""
    words = []
    for place, (title, table) in enumerate(zip(_titles(tables), tables, strict=True)):
        there = [other[place] for other in others]
        keys = dict.fromkeys(key for other in there for key in other if key not in ("name", "label"))
        odd = [k for k in keys if not title or any(k not in other or other[k] != table.get(k) for other in there)]
        settings = [f"{key}={_plain(table[key])}" for key in odd if key in table]
        words.append(" ".join(filter(None, (title, *settings))))
    return " + ".join(filter(None, words)) or NONE
