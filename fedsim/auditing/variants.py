"""Findings of one attack made in several ways: what distinguishes them, and the names that tell them apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.attacks import Attack
from fedsim.errors import PluginError, RunError
from fedsim.plugins.frozen import plain

VARIANT = ("variant", "settings", "granted")
"""Columns of `scores.csv`: a hash of everything that an attack was made with, the settings that differ from its
defaults, and the facts that it was granted."""


def settings_of(attack: Attack) -> dict[str, Any]:
    """The settings of `attack` as they are written beside its findings.

    Raises:
        PluginError: one of them is neither a number, a text, a path, a member of an enumeration nor made of these.
    """
    found = {}
    for name, value in dataclasses.asdict(attack).items():
        try:
            found[name] = json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{type(attack).__name__}: {name}: settings are numbers, texts, paths, members of an enumeration, and "
                f"lists and tables of these, got {type(value).__name__}; change the type of this field"
            ) from error
    return found


def changed(attack: Attack) -> dict[str, Any]:
    """The settings of `attack` that differ from its defaults."""
    found, written = {}, settings_of(attack)
    for field in dataclasses.fields(attack):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if getattr(attack, field.name) != default:
            found[field.name] = written[field.name]
    return found


def variant(*made_with: Any) -> str:
    """Eight hexadecimal digits: a hash of plug-in, settings, knowledge and the variant that an attack builds on."""
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:8]


def columns(about: Mapping[str, Any]) -> dict[str, str]:
    """The columns `VARIANT` of `scores.csv` for one finding."""
    return {
        "variant": about["variant"],
        "settings": json.dumps(about["changed"], sort_keys=True),
        "granted": " ".join(about["granted"]),
    }


def told_apart(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """A name for each (title, variant): the title, and in brackets what differs where there are several variants.

    Args:
        rows: of `scores.csv`, or with the same columns of findings.
    """
    titles: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        titles[row["attack"]][row["variant"]] = row
    names = {}
    for title, variants in titles.items():
        told = {key: _told(row, list(variants.values())) for key, row in variants.items()}
        for key, text in told.items():
            if len(variants) == 1:
                names[title, key] = title
            elif list(told.values()).count(text) == 1:
                names[title, key] = f"{title} ({text})"
            else:
                names[title, key] = f"{title} ({', '.join(filter(None, (text, key)))})"
    return names


def named(
    rows: Iterable[Mapping[str, Any]], names: Mapping[tuple[str, str], str] | None = None
) -> list[dict[str, Any]]:
    """The same rows, in which `attack` is a name that tells variants apart and `title` is the attack's title.

    Args:
        names: names of the attacks, where they are shown beside others than these; see `told_apart`.
    """
    known = list(rows)
    names = told_apart(known) | dict(names or {})
    return [{**row, "attack": names[row["attack"], row["variant"]], "title": row["attack"]} for row in known]


def _told(row: Mapping[str, Any], others: list[Mapping[str, Any]]) -> str:
    """What differs between `row` and the other variants of its title."""
    own, settings = _settings(row), [_settings(other) for other in others]
    odd = sorted({key for other in settings for key in other if any(o.get(key) != other[key] for o in settings)})
    words = [f"{key}={own[key]}" if key in own else f"{key} as by default" for key in odd]
    granted = [set(other["granted"].split()) for other in others]
    for name in sorted(granted[0].union(*granted) - granted[0].intersection(*granted)):
        words.append(f"{'with' if name in row['granted'].split() else 'without'} {name}")
    return ", ".join(words)


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(row["settings"])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunError(
            f"scores.csv: the settings of '{row['attack']}' are {row['settings']!r}, expected a table in JSON; remove "
            "the file and run `fedsim attack` again"
        )
    return found
