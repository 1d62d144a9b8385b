"""All pitfalls that are looked for, and the search."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fedsim.pitfalls.adversary_rules import (
    AuxiliaryTestData,
    FewVictims,
    GrantedLabels,
    NaiveAttacks,
    NoPublicPrior,
    PrivateKnowledge,
)
from fedsim.pitfalls.comparison_rules import NoAttack, NoControl, NoStrength, OneSeed, RefusedCells, UndefendedRounds
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.pitfalls.pitfall import Pitfall, PitfallRule, Untried
from fedsim.pitfalls.setting_rules import EasyData, EqualClients, FreshWeights, LittleLocalWork

RULES: tuple[PitfallRule, ...] = (
    NoAttack(),
    RefusedCells(),
    NoStrength(),
    NoControl(),
    UndefendedRounds(),
    NaiveAttacks(),
    NoPublicPrior(),
    PrivateKnowledge(),
    GrantedLabels(),
    AuxiliaryTestData(),
    FewVictims(),
    EasyData(),
    EqualClients(),
    LittleLocalWork(),
    FreshWeights(),
    OneSeed(),
)
"""Rules; the gravest pitfalls come first."""


def find_pitfalls(design: EvaluationDesign) -> list[Pitfall]:
    """Return the pitfalls of an evaluation, and those that could not be looked for.

    Raises:
        FedsimError: a plug-in refuses its settings.
    """
    pitfalls = []
    for rule in RULES:
        symptom = rule.find(design)
        if symptom is None:
            continue
        if isinstance(symptom, Untried):
            pitfalls.append(
                Pitfall(
                    name=rule.name,
                    title=f"not checked: {rule.title}",
                    detail=symptom.why,
                    reason=rule.reason,
                    counter_experiment="",
                    was_tried=False,
                )
            )
            continue
        tables = design.write_out_changes(rule.name, symptom.changes, symptom.further)
        pitfalls.append(
            Pitfall(
                name=rule.name,
                title=rule.title,
                detail=symptom.detail,
                reason=rule.reason,
                counter_experiment=format_tables(tables),
            )
        )
    return pitfalls


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_tables(tables: Mapping[str, Any]) -> str:
    """Write tables as TOML.

    >>> print(format_tables({"data": {"name": "svhn"}, "attack": [{"name": "sme", "tv_weight": 0.1}]}))
    [data]
    name = "svhn"
    <BLANKLINE>
    [[attack]]
    name = "sme"
    tv_weight = 0.1
    <BLANKLINE>
    """
    return "\n".join(f"{section}\n" for section in _format_sections(tables, ""))


def _format_sections(tables: Mapping[str, Any], prefix: str) -> list[str]:
    """Return a text for each table, those of keys before those of further tables."""
    lines: list[str] = []
    sections: list[str] = []
    for key, value in tables.items():
        path = f"{prefix}{_format_key(key)}"
        if isinstance(value, Mapping):
            sections += _format_sections(value, f"{path}.")
        elif value and isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            for item in value:
                sections.append("\n".join([f"[[{path}]]", *_format_keys(item)]))
        else:
            lines += _format_keys({key: value})
    if lines:
        header = [f"[{prefix[:-1]}]"] if prefix else []
        sections.insert(0, "\n".join([*header, *lines]))
    return sections


def _format_keys(table: Mapping[str, Any]) -> list[str]:
    return [f"{_format_key(key)} = {_format_value(value)}" for key, value in table.items()]


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_format_keys(value))} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)  # texts, whole numbers and truth values are the same in TOML
