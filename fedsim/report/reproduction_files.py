"""Attack files that reproduce findings, built from nothing but what the findings record about themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.audit.audit import Audit
from fedsim.audit.plan import ADAPTIVE
from fedsim.base.errors import FedsimError
from fedsim.federation.adversary_tables import is_stated
from fedsim.interfaces.attack import Attack
from fedsim.plugins import registry
from fedsim.report.finding_views import FindingView

_Rounds = tuple[int, ...]
_Scope = tuple[_Rounds, tuple[int, ...], int]
"""Rounds, victims (none for all that are recorded), and the number of random starts on each."""


@dataclass(kw_only=True)
class _FileDraft:
    """Attack file that is being put together.

    Attributes:
        scope: the rounds, victims and random starts that it attacks.
        knowledge: the facts that its attacks read, as it has to grant or withhold them.
    """

    scope: _Scope
    app: Mapping[str, Any]
    knowledge: dict[str, Any] = field(default_factory=dict)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[FindingView] = field(default_factory=list)

    def can_make(self, about: Mapping[str, Any]) -> bool:
        """Return whether this file can make such a finding as well, without contradicting itself."""
        table = attack_table(about)
        same_knowledge = all(self.knowledge.get(name, value) == value for name, value in about["knowledge"].items())
        return same_knowledge and self.app == about["app"] and self.attacks.get(file_title(about), table) == table

    def add(self, about: Mapping[str, Any]) -> None:
        """Add the attack that made a finding."""
        self.knowledge |= about["knowledge"]
        self.attacks[file_title(about)] = attack_table(about)

    def tables(self, *, has_experiment: bool) -> dict[str, Any]:
        """Return the tables of the file.

        Args:
            has_experiment: False for a recording made elsewhere: nothing can be granted there but what its author
                wrote, so facts with their default are left out.
        """
        rounds, victims, repeats = self.scope
        adversary: dict[str, Any] = {"victims": list(victims) or "all", "rounds": list(rounds), "repeats": repeats}
        knowledge = {}
        for name, value in sorted(self.knowledge.items()):
            if has_experiment or is_stated(name, value):
                knowledge[name] = value
        tables = {
            "adversary": adversary | {"knowledge": knowledge},
            "attack": [self.attacks[name] for name in sorted(self.attacks)],
        }
        return tables | ({"app": dict(self.app)} if self.app else {})


def attack_files(
    remaining: Sequence[FindingView],
    findings: Sequence[FindingView],
    audit: Audit | None,
    clients_by_round: Mapping[int, set[int]],
) -> Iterator[tuple[dict[str, Any], list[FindingView]]]:
    """Yield the tables of attack files that make the findings `remaining`, with the findings that each makes.

    Args:
        audit: says whose recording it is, and whether its code is trusted.
        clients_by_round: the clients whose single update was recorded.
    """
    drafts = list[_FileDraft]()
    # Put the attacks of all findings into as few files as can hold them.
    for items in _group_by_attack(remaining):
        about = items[0].about
        join_rounds = _reads_one_round(str(about["plugin"]), audit)
        for scope, block in _blocks(items, clients_by_round, join_rounds=join_rounds):
            draft = next((draft for draft in drafts if draft.scope == scope and draft.can_make(about)), None)
            if draft is None:
                draft = _FileDraft(scope=scope, app=about["app"])
                drafts.append(draft)
            draft.add(about)
            draft.findings += block
    # Add the attacks that those build on.
    sources = {file_title(item.about): item.about for item in findings}
    for draft in sorted(drafts, key=lambda draft: (draft.scope, sorted(draft.attacks))):
        for table in list(draft.attacks.values()):
            _add_sources(draft, table, sources)
        yield draft.tables(has_experiment=audit is not None and audit.config is not None), draft.findings


def _add_sources(draft: _FileDraft, table: Mapping[str, Any], sources: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to a file the attack that `table` builds on, the attack that this builds on, and so forth."""
    while (source := table.get("source")) in sources and source not in draft.attacks:
        about = sources[str(source)]
        if not draft.can_make(about):
            return
        draft.add(about)
        table = draft.attacks[str(source)]


def _group_by_attack(findings: Iterable[FindingView]) -> Iterable[list[FindingView]]:
    """Group findings of the same attack with the same settings and knowledge."""
    groups = defaultdict[tuple[str, str], list[FindingView]](list)
    for finding in findings:
        groups[str(finding.about["title"]), str(finding.about["variant"])].append(finding)
    return groups.values()


def file_title(about: Mapping[str, Any]) -> str:
    """Return the title of an attack in a file; naive and adaptive attack are made by the same table."""
    finding_title = str(about["title"])
    return finding_title.removesuffix(f" {ADAPTIVE}") if "defenses" in about["granted"] else finding_title


def attack_table(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of an attack with all its settings, as a finding records them."""
    plugin, label = str(about["plugin"]), file_title(about)
    settings = {name: value for name, value in about["settings"].items() if value is not None}
    return {"name": plugin} | ({"label": label} if label != plugin else {}) | settings


def _reads_one_round(plugin: str, audit: Audit | None) -> bool:
    """Return whether an attack reads one round, so that a file with several rounds makes it on each.

    False if the attack is unknown.
    """
    if ":" in plugin and not (audit and audit.trust):
        return False
    try:
        attack = registry.load("attacks", plugin)
    except FedsimError:
        return False
    return issubclass(attack, Attack) and attack.reads_one_round()


def _blocks(
    findings: Sequence[FindingView], clients_by_round: Mapping[int, set[int]], *, join_rounds: bool
) -> Iterator[tuple[_Scope, list[FindingView]]]:
    """Cut findings of one attack into blocks: each has all of some victims in all of some rounds from all starts.

    Args:
        join_rounds: a block may have several rounds, of which each finding is about one.
    """
    # Findings by rounds and victim; their number of starts.
    starts = defaultdict[tuple[_Rounds, int], list[FindingView]](list)
    for finding in findings:
        starts[tuple(finding.about["rounds"]), int(finding.about["victim"])].append(finding)
    victims = defaultdict[tuple[_Rounds, int], list[int]](list)
    for (rounds, victim), items in starts.items():
        repeats = 1 + max(int(item.about["repeat"]) for item in items)
        victims[rounds, repeats].append(victim)
    # Rounds in which the same victims were attacked equally often.
    joined = defaultdict[tuple[tuple[int, ...], int, _Rounds], list[_Rounds]](list)
    for (rounds, repeats), attacked in victims.items():
        recorded = set().union(*(clients_by_round.get(number, ()) for number in rounds))
        named_victims = () if recorded == set(attacked) else tuple(sorted(attacked))
        separate_rounds = () if join_rounds and len(rounds) == 1 else rounds
        joined[named_victims, repeats, separate_rounds].append(rounds)
    for (named_victims, repeats, _), several_rounds in joined.items():
        block = list[FindingView]()
        for rounds in several_rounds:
            for victim in named_victims or victims[rounds, repeats]:
                block += starts[rounds, victim]
        numbers = sorted({number for rounds in several_rounds for number in rounds})
        yield (tuple(numbers), named_victims, repeats), block
