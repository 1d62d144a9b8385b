"""Threat model of a run: what was granted to the adversary, which attacks need it, and what of it is unusual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.audit.audit import Audit
from fedsim.interfaces.knowledge import FACTS, MESSAGE_FACTS


@dataclass(frozen=True, kw_only=True)
class GrantedFact:
    """Fact that can be granted to the adversary.

    Attributes:
        name: the fact.
        about: what it is.
        granted: whether it is granted.
        withheld: whether the threat model says that it is not; a fact that a federation does not have is neither.
        exclusive_to: the attacks that were handed it, where others that declare it were not.
        needed_by: the attacks that cannot do without it.
        used_by: the others that had it.
    """

    name: str
    about: str
    granted: bool
    withheld: bool
    exclusive_to: Sequence[str]
    needed_by: Sequence[str]
    used_by: Sequence[str]

    @property
    def usual(self) -> bool:
        """True where a threat model grants it unless it says otherwise."""
        return self.name in MESSAGE_FACTS or FACTS[self.name].granted_by_default

    @property
    def victims(self) -> str:
        """Which part of the victim's own data it is; empty where it is none."""
        return FACTS[self.name].victim_data if self.name in FACTS else ""

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.name.replace("_", " ")


def list_granted_facts(
    audit: Audit | None, findings: Sequence[Mapping[str, Any]], attacks: Mapping[str, Any]
) -> list[GrantedFact]:
    """Return everything that can be granted; nothing if it is unknown what was.

    An attack is handed those granted facts that it declares, so the facts that a finding was made with are those that
    its attack had.

    Args:
        attacks: by title, the class; None if it is unknown.
    """
    # Which facts each attack was handed.
    handed: dict[str, set[str]] = {}
    for finding in findings:
        handed.setdefault(str(finding["attack"]), set()).update(finding["granted"])
    knowledge = audit.spec.adversary.knowledge if audit else None
    not_withheld = {name for name in FACTS if knowledge is not None and getattr(knowledge, name) is not False}
    if not findings:
        handed = {title: not_withheld & cls.declared_facts() for title, cls in attacks.items() if cls}
    if not handed:
        return []
    rows = []
    for name, fact in FACTS.items():
        attacks_with = [title for title, names in handed.items() if name in names]
        attacks_without = []
        for title, names in handed.items():
            cls = attacks.get(title)
            if cls and name in cls.declared_facts() - names:
                attacks_without.append(title)
        needed_by = [title for title, cls in attacks.items() if cls and name in cls.needs]
        rows.append(
            GrantedFact(
                name=name,
                about=fact.about,
                granted=bool(attacks_with) or (name in not_withheld and not attacks_without),
                withheld=not attacks_with and name not in not_withheld,
                exclusive_to=attacks_with if attacks_with and attacks_without else [],
                needed_by=needed_by,
                used_by=[title for title in attacks_with if title not in needed_by],
            )
        )
    # What messages show is no news to a server, unless the threat model withholds it.
    for name, about in MESSAGE_FACTS.items():
        if knowledge is not None and not getattr(knowledge, name):
            needed_by = [title for title, cls in attacks.items() if cls and getattr(cls, f"needs_{name}")]
            rows.append(
                GrantedFact(
                    name=name,
                    about=about,
                    granted=False,
                    withheld=True,
                    exclusive_to=[],
                    needed_by=needed_by,
                    used_by=[],
                )
            )
    return rows
