"""Attack files that make findings again, out of nothing but what the findings say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.attacks import Attack
from fedsim.auditing.audit import Audit
from fedsim.auditing.plan import ADAPTIVE
from fedsim.errors import FedsimError
from fedsim.experiments.config import AttackFile
from fedsim.plugins import registry
from fedsim.reporting.evidence import Found


@dataclass(kw_only=True)
class _File:
    """An attack file in the making.

    Attributes:
        whom: rounds, victims, and how often each is attacked.
        rules: what it has to grant or to withhold.
        app: its table [app].
        attacks: by title, its tables of attacks.
        made: the findings that it makes.
    """

    whom: tuple[tuple[int, ...], tuple[int, ...], int]
    rules: dict[str, Any] = field(default_factory=dict)
    app: Mapping[str, Any] = field(default_factory=dict)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: list[Found] = field(default_factory=list)

    def takes(self, title: str, table: Mapping[str, Any], rules: Mapping[str, Any], app: Mapping[str, Any]) -> bool:
        """Whether such findings can be made by the same file."""
        agree = all(self.rules.get(name, value) == value for name, value in rules.items())
        return agree and self.app == app and self.attacks.get(title, table) == table

    @property
    def tables(self) -> dict[str, Any]:
        """What it says."""
        rounds, victims, repeats = self.whom
        adversary: dict[str, Any] = {"victims": list(victims), "rounds": list(rounds), "repeats": repeats}
        tables = {"adversary": adversary | {"knowledge": self.rules}, "attack": list(self.attacks.values())}
        return tables | ({"app": dict(self.app)} if self.app else {})


def attack_files(
    audit: Audit | None, left: Sequence[Found], *, own: bool
) -> Iterator[tuple[dict[str, Any], list[Found]]]:
    """Attack files that make the findings `left`, and which of them each makes."""
    alike = defaultdict[tuple[str, str], list[Found]](list)
    for item in left:
        alike[str(item.about["title"]), str(item.about["variant"])].append(item)
    files, known = list[_File](), dict[str, dict[str, Any]]()
    for items in alike.values():
        about = items[0].about
        name, cls, rules = title(about), _class(audit, str(about["plugin"])), _rules(about, own=own)
        table, app = attack_table(name, about), about["app"] or {}
        known[name] = table
        if cls is not None:
            rules = {fact: value for fact, value in rules.items() if fact in cls.declared()}
        for whom, some in _blocks(items, together=cls is not None and not cls.temporal):
            file = next((f for f in files if f.whom == whom and f.takes(name, table, rules, app)), None)
            if file is None:
                files.append(file := _File(whom=whom, app=app))
            file.rules |= rules
            file.attacks[name] = table
            file.made += some
    for file in files:
        for table in list(file.attacks.values()):
            while (source := table.get("source")) in known and source not in file.attacks:
                table = file.attacks[str(source)] = known[str(source)]
        yield file.tables, file.made


def title(about: Mapping[str, Any]) -> str:
    """What the file calls an attack: the one that knows the defenses is made by the same table as the other."""
    own = str(about["title"])
    return own.removesuffix(f" {ADAPTIVE}") if "defenses" in about["granted"] else own


def attack_table(called: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an attack with all its settings, as a finding says them."""
    plugin = str(about["plugin"])
    settings = {name: value for name, value in about["settings"].items() if value is not None}
    return {"name": plugin} | ({"label": called} if called != plugin else {}) | settings


def _rules(about: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
    """What its file has to say of each fact, so that the attack is handed what it was handed."""
    written = about["knowledge"]
    if written is None:  # of an earlier fedsim
        written = dict.fromkeys(about["granted"], True) if own else {}
        written |= {"partial_records": about["partial_records"]} if about["partial_records"] else {}
    withheld = set(AttackFile().adversary.knowledge.model_dump()) - set(written) - {"defenses"}
    return dict.fromkeys(sorted(withheld), False) | dict(written)


def _class(audit: Audit | None, plugin: str) -> type[Attack] | None:
    """None where nobody trusts it or it is not there."""
    if ":" in plugin and not (audit and audit.trust):
        return None
    try:
        loaded = registry.load("attacks", plugin)
    except FedsimError:
        return None
    return loaded if issubclass(loaded, Attack) else None


_Whom = tuple[tuple[int, ...], tuple[int, ...], int]


def _blocks(items: Sequence[Found], *, together: bool) -> Iterator[tuple[_Whom, list[Found]]]:
    """Findings of one attack, cut such that each part is all victims by all rounds by all starts.

    Args:
        together: whether rounds are attacked one by one, so that one file can name several.
    """
    starts = defaultdict[tuple[tuple[int, ...], int], list[Found]](list)
    for item in items:
        starts[tuple(item.about["rounds"]), int(item.about["victim"])].append(item)
    victims = defaultdict[tuple[tuple[int, ...], int], list[int]](list)
    for (rounds, victim), some in starts.items():
        victims[rounds, 1 + max(int(item.about["repeat"]) for item in some)].append(victim)
    rounds_of = defaultdict[tuple[tuple[int, ...], int, tuple[int, ...]], list[tuple[int, ...]]](list)
    for (rounds, repeats), whom in victims.items():
        alone = together and len(rounds) == 1
        rounds_of[tuple(sorted(whom)), repeats, () if alone else rounds].append(rounds)
    for (whom_, repeats, _), several in rounds_of.items():
        rounds = tuple(sorted({number for some_rounds in several for number in some_rounds}))
        yield (
            (rounds, whom_, repeats),
            [item for some_rounds in several for victim in whom_ for item in starts[some_rounds, victim]],
        )
