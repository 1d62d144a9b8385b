"""The threat model of a run: what was granted, to whom, who needs it, and what of it is unusual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.auditing.audit import Audit
from fedsim.knowledge import FACTS
from fedsim.reporting.evidence import Found


@dataclass(frozen=True, kw_only=True)
class Threat:
    """One thing that can be granted.

    Attributes:
        name: of the fact.
        about: what it is.
        granted: whether it is.
        withheld: whether the threat model says that it is not; what a federation does not have is neither of both.
        only: the attacks that were handed it, where others that declare it were not.
        needed, used: the attacks that cannot do without it, and the others that had it.
    """

    name: str
    about: str
    granted: bool
    withheld: bool
    only: Sequence[str]
    needed: Sequence[str]
    used: Sequence[str]

    @property
    def usual(self) -> bool:
        """Whether a threat model grants it unless it says otherwise."""
        return FACTS[self.name].granted

    @property
    def victims(self) -> str:
        """What of the victim's own data it is; empty where it is none."""
        return FACTS[self.name].victims

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.name.replace("_", " ")


def threats(audit: Audit | None, found: Sequence[Found], attacks: Mapping[str, Any]) -> list[Threat]:
    """Everything that can be granted; nothing where nobody knows what was.

    An attack is handed what it declares of what is granted, so what a finding was made with is what its attack had.

    Args:
        attacks: by title, the class; None where nobody knows it.
    """
    handed: dict[str, set[str]] = {}
    for item in found:
        handed.setdefault(str(item.about["attack"]), set()).update(item.about["granted"])
    table = audit.spec.adversary.knowledge if audit else None
    open_to_all = {name for name in FACTS if table is not None and getattr(table, name) is not False}
    if not found:
        handed = {title: open_to_all & cls.declared() for title, cls in attacks.items() if cls}
    told = []
    for name, fact in FACTS.items():
        having = [title for title, names in handed.items() if name in names]
        without = [title for title in handed if (cls := attacks.get(title)) and name in cls.declared() - handed[title]]
        needed = [title for title, cls in attacks.items() if cls and name in cls.needs]
        told.append(
            Threat(
                name=name,
                about=fact.about,
                granted=bool(having) or (name in open_to_all and not without),
                withheld=not having and name not in open_to_all,
                only=having if having and without else [],
                needed=needed,
                used=[title for title in having if title not in needed],
            )
        )
    return told if handed else []
