"""Name the variants of an attack, which were made with different settings or knowledge."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.base.errors import PluginError, RunError
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.knowledge import MESSAGE_FACTS
from fedsim.plugins.frozen import to_plain_value

VARIANT_COLUMNS = ("variant", "settings", "granted")
"""Columns of `scores.csv`: a hash of everything that an attack was made with, the settings that
differ from its defaults, and the facts that it was granted."""
WHO = "adversary.who"
"""Key among these settings of who attacked, where that was not the server."""


def settings_of(attack: Attack) -> dict[str, Any]:
    """Return the settings of `attack` as they are saved with its findings."""
    settings = {}
    for name, value in dataclasses.asdict(attack).items():
        try:
            settings[name] = json.loads(json.dumps(value, default=to_plain_value))
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{type(attack).__name__}: {name}: settings are numbers, texts, paths, members of an enumeration, and "
                f"lists and tables of these, got {type(value).__name__}; change the type of this field"
            ) from error
    return settings


def changed_settings(attack: Attack) -> dict[str, Any]:
    """Return the settings of `attack` that differ from its defaults."""
    differing, settings = {}, settings_of(attack)
    for field in dataclasses.fields(attack):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if getattr(attack, field.name) != default:
            differing[field.name] = settings[field.name]
    return differing


def hash_variant(*made_with: Any) -> str:
    """Return eight hexadecimal digits, a hash of what an attack was made with."""
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:8]


def variant_columns(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns `VARIANT_COLUMNS` of `scores.csv` for one finding."""
    knowledge = about.get("knowledge") or {}
    withheld = {f"adversary.knowledge.{name}": False for name in MESSAGE_FACTS if knowledge.get(name) is False}
    attacker = {WHO: about["attacker"]} if "attacker" in about else {}
    return {
        "variant": about["variant"],
        "settings": json.dumps(about["changed"] | attacker | withheld, sort_keys=True),
        "granted": " ".join(about["granted"]),
    }


def variant_names(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Name each (title, variant): the title, and in brackets what differs from other variants.

    Args:
        rows: of `scores.csv`, or with the same columns of findings.

    >>> dlg = {"attack": "dlg", "granted": ""}
    >>> variants = [{"variant": "a", "settings": "{}"}, {"variant": "b", "settings": '{"lr": 2}'}]
    >>> variant_names([dlg | variant for variant in variants])
    {('dlg', 'a'): 'dlg (lr as by default)', ('dlg', 'b'): 'dlg (lr=2)'}
    """
    titles: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        titles[row["attack"]][row["variant"]] = row
    names = {}
    for title, variants in titles.items():
        differences: dict[str, str] = {}
        for variant_hash, row in variants.items():
            differences[variant_hash] = _difference(row, list(variants.values()))
        for variant_hash, text in differences.items():
            if len(variants) == 1:
                name = title
            elif list(differences.values()).count(text) == 1:
                name = f"{title} ({text})"
            else:
                # Variants whose settings and facts are equal differ in code or source.
                name = f"{title} ({', '.join(filter(None, (text, variant_hash)))})"
            names[title, variant_hash] = name
    return names


def name_variants(
    rows: Iterable[Mapping[str, Any]], names: Mapping[tuple[str, str], str] | None = None
) -> list[dict[str, Any]]:
    """Copy `rows` with the variant's name as `attack` and the attack's title as `title`."""
    all_rows = list(rows)
    all_names = variant_names(all_rows) | dict(names or {})
    named_rows = []
    for row in all_rows:
        name = all_names[row["attack"], row["variant"]]
        named_rows.append({**row, "attack": name, "title": row["attack"]})
    return named_rows


def _difference(row: Mapping[str, Any], variants: list[Mapping[str, Any]]) -> str:
    """Say what differs between `row` and the other variants of its title."""
    row_settings = _read_settings(row)
    all_settings = [_read_settings(variant) for variant in variants]
    # Name the settings that are not the same in all variants.
    differing: set[str] = set()
    for settings in all_settings:
        for key, value in settings.items():
            if any(other_settings.get(key) != value for other_settings in all_settings):
                differing.add(key)
    parts = []
    for key in sorted(differing):
        is_set = key in row_settings
        parts.append(f"{key}={row_settings[key]}" if is_set else f"{key} as by default")
    # Name the facts that are not granted to all variants.
    granted = [set(variant["granted"].split()) for variant in variants]
    for name in sorted(granted[0].union(*granted) - granted[0].intersection(*granted)):
        parts.append(f"{'with' if name in row['granted'].split() else 'without'} {name}")
    return ", ".join(parts)


def _read_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings = json.loads(row["settings"])
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise RunError(
            f"scores.csv: the settings of '{row['attack']}' are {row['settings']!r}, expected a table in JSON; remove "
            "the file and run `fedsim attack` again"
        )
    return settings
