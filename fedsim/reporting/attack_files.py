"""Attack files that make findings again, out of nothing but what the findings say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.auditing.audit import Audit
from fedsim.auditing.plan import ADAPTIVE
from fedsim.errors import FedsimError
from fedsim.experiments.config import AttackFile
from fedsim.plugins import registry
from fedsim.reporting.evidence import Found

_Whom = tuple[tuple[int, ...], tuple[int, ...], int]
"""Rounds, victims (none for all that are recorded), and how often each is attacked."""
_OPEN = AttackFile().adversary.knowledge.model_dump()
"""What is granted where a file does not say otherwise."""


@dataclass(kw_only=True)
class _File:
    """An attack file in the making.

    Attributes:
        knowledge: the facts that its attacks read, as it has to grant or withhold them.
        app: its table [app].
        attacks: by title, its tables of attacks.
        made: the findings that it makes.
    """

    whom: _Whom
    app: Mapping[str, Any]
    knowledge: dict[str, Any] = field(default_factory=dict)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: list[Found] = field(default_factory=list)

    def takes(self, about: Mapping[str, Any]) -> bool:
        """Whether it can make such a finding as well."""
        table = attack_table(about)
        known = all(self.knowledge.get(name, value) == value for name, value in about["knowledge"].items())
        return known and self.app == _app(about) and self.attacks.get(title(about), table) == table

    def add(self, about: Mapping[str, Any]) -> None:
        """Have it make an attack."""
        self.knowledge |= about["knowledge"]
        self.attacks[title(about)] = attack_table(about)

    def tables(self, *, own: bool) -> dict[str, Any]:
        """What it says; of a recording made elsewhere, which has nothing to grant, only what its author wrote."""
        rounds, victims, repeats = self.whom
        adversary: dict[str, Any] = {"victims": list(victims) or "all", "rounds": list(rounds), "repeats": repeats}
        granted = {name: value for name, value in sorted(self.knowledge.items()) if own or value != _OPEN.get(name)}
        tables = {
            "adversary": adversary | {"knowledge": granted},
            "attack": [self.attacks[called] for called in sorted(self.attacks)],
        }
        return tables | ({"app": dict(self.app)} if self.app else {})


def attack_files(
    left: Sequence[Found], found: Sequence[Found], audit: Audit | None, everyone: Mapping[int, set[int]]
) -> Iterator[tuple[dict[str, Any], list[Found]]]:
    """Attack files that make the findings `left`, and which of them each makes.

    Args:
        found: all findings, on which an attack may build.
        audit: says whose recording it is, and whether its code is trusted.
        everyone: by round, the clients that sent an update of their own.
    """
    files = list[_File]()
    for items in _alike(left):
        about = items[0].about
        for whom, some in _blocks(items, everyone, together=_reads_one_round(str(about["plugin"]), audit)):
            file = next((file for file in files if file.whom == whom and file.takes(about)), None)
            if file is None:
                files.append(file := _File(whom=whom, app=_app(about)))
            file.add(about)
            file.made += some
    sources = {title(item.about): item.about for item in found if item.about["knowledge"] is not None}
    for file in sorted(files, key=lambda file: (file.whom, sorted(file.attacks))):
        for table in list(file.attacks.values()):
            while (source := table.get("source")) in sources and source not in file.attacks:
                if not file.takes(about := sources[str(source)]):
                    break
                file.add(about)
                table = file.attacks[str(source)]
        yield file.tables(own=audit is not None and audit.experiment is not None), file.made


def _alike(items: Iterable[Found]) -> Iterable[list[Found]]:
    """Findings of the same attack with the same settings and knowledge, together."""
    found = defaultdict[tuple[str, str], list[Found]](list)
    for item in items:
        found[str(item.about["title"]), str(item.about["variant"])].append(item)
    return found.values()


def _app(about: Mapping[str, Any]) -> Mapping[str, Any]:
    return about["app"] or {}


def title(about: Mapping[str, Any]) -> str:
    """What the file calls an attack: the one that knows the defenses is made by the same table as the other."""
    own = str(about["title"])
    return own.removesuffix(f" {ADAPTIVE}") if "defenses" in about["granted"] else own


def attack_table(about: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an attack with all its settings, as a finding says them."""
    plugin, called = str(about["plugin"]), title(about)
    settings = {name: value for name, value in about["settings"].items() if value is not None}
    return {"name": plugin} | ({"label": called} if called != plugin else {}) | settings


def _reads_one_round(plugin: str, audit: Audit | None) -> bool:
    """Whether an attack reads one round, so that a file with several makes it on each; not where nobody knows it."""
    if ":" in plugin and not (audit and audit.trust):
        return False
    try:
        return not getattr(registry.load("attacks", plugin), "temporal", True)
    except FedsimError:
        return False


def _blocks(
    items: Sequence[Found], everyone: Mapping[int, set[int]], *, together: bool
) -> Iterator[tuple[_Whom, list[Found]]]:
    """Findings of one attack, cut into blocks: each is all of some victims in all of some rounds from all starts.

    Args:
        together: whether a block may have several rounds, of which each finding is about one.
    """
    of = defaultdict[tuple[tuple[int, ...], int], list[Found]](list)
    for item in items:
        of[tuple(item.about["rounds"]), int(item.about["victim"])].append(item)
    victims = defaultdict[tuple[tuple[int, ...], int], list[int]](list)
    for (rounds, victim), several in of.items():
        victims[rounds, 1 + max(int(item.about["repeat"]) for item in several)].append(victim)
    views = defaultdict[tuple[tuple[int, ...], int, tuple[int, ...]], list[tuple[int, ...]]](list)
    for (rounds, repeats), named in victims.items():
        all_of_them = set().union(*(everyone.get(number, ()) for number in rounds)) == set(named)
        views[
            () if all_of_them else tuple(sorted(named)), repeats, () if together and len(rounds) == 1 else rounds
        ].append(rounds)
    for (whom, repeats, _), seen in views.items():
        rounds = tuple(sorted({number for view in seen for number in view}))
        yield (
            (rounds, whom, repeats),
            [item for view in seen for victim in whom or victims[view, repeats] for item in of[view, victim]],
        )
