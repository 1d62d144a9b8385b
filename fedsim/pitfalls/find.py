"""All pitfalls that are looked for, and the search."""

from __future__ import annotations

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
from fedsim.pitfalls.pitfall_text import format_tables
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
