"""Levels of the threat models of [Carletti2025], by what an attack was granted.

They order passive adversaries that see the updates of single clients by what they know besides:
A sees these alone, B also knows basic facts of the data, C settings of training, D surrogate data,
E how the clients' data are distributed; F to H manipulate, which fedsim's adversaries do not.

References:
    [Carletti2025], table of threat models.
    Differs: which facts belong to a column is read from the attacks that the paper files under each level, as DLG
    under A, so that architecture, loss and the shape of examples are no basic knowledge. Labels of the victim have
    no level there, nor has anything else of its data, nor the defenses; such facts are named beside the level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.interfaces.attack import OPTIMAL
from fedsim.interfaces.knowledge import TRAINING_FACTS
from fedsim.recording.adversary_role import AdversaryRole

_LEVELS: Sequence[tuple[str, str, Sequence[str]]] = (
    ("A", "Eavesdropper", ("model", "loss", "input_shape", "num_classes")),
    ("B", "Informed Eavesdropper", ("columns", "value_range", "input_mean", "input_std", "noise_covariance")),
    ("C", "Parameter-Aware Eavesdropper", TRAINING_FACTS),
    ("D", "Data-Enhanced Eavesdropper", ("auxiliary", "property_records")),
)
"""Level, name, and the facts that no lower level has, from the least knowledge on."""


@dataclass(frozen=True)
class KnowledgeLevel:
    """Threat model of an attack.

    Attributes:
        level: the first that has all granted facts but those that no level has.
        beyond: facts that no level has, in words.
    """

    level: str
    name: str
    beyond: tuple[str, ...] = ()


def find_level(granted: Iterable[str]) -> KnowledgeLevel:
    """Return the threat model of an attack that was granted these facts.

    >>> find_level(["model", "loss", "learning_rate", "labels"])
    KnowledgeLevel(level='C', name='Parameter-Aware Eavesdropper', beyond=('labels',))
    """
    remaining = list(granted)
    level, name, _ = _LEVELS[0]
    for higher_level, higher_name, facts in _LEVELS:
        if any(fact in facts for fact in remaining):
            level, name = higher_level, higher_name
        remaining = [fact for fact in remaining if fact not in facts]
    return KnowledgeLevel(level, name, tuple(fact.replace("_", " ") for fact in remaining))


def list_levels(findings: Iterable[Mapping[str, Any]]) -> dict[KnowledgeLevel, list[str]]:
    """Return the titles of attacks by their threat model, from the least knowledge on.

    Findings from sums, of those who see models alone, of a server that colludes with clients and of parties of split
    learning are left out: the levels are of adversaries that see updates of single clients, and nothing else. So is
    an attack on the optimal model, which no adversary has. One that reads the model of another attack knows what
    that knew.
    """
    findings = list(findings)
    facts_by_attack: dict[str, list[str]] = {}
    for finding in findings:
        facts_by_attack.setdefault(str(finding["attack"]), []).extend(finding["granted"])
    titles: dict[KnowledgeLevel, list[str]] = {}
    for finding in findings:
        source = str(finding.get("settings", {}).get("source", ""))
        role = AdversaryRole.parse(finding.get("attacker", "server"))
        if (
            finding.get("members")
            or role.party not in ("server", "eavesdropper")
            or role.colluders
            or source == OPTIMAL
        ):
            continue
        facts = dict.fromkeys([*finding["granted"], *facts_by_attack.get(source, ())])
        named = titles.setdefault(find_level(facts), [])
        if finding["attack"] not in named:
            named.append(str(finding["attack"]))
    return dict(sorted(titles.items(), key=lambda item: (item[0].level, item[0].beyond)))
