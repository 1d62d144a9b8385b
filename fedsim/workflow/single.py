"""One attack on one client of a recorded run, made from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.attacks import Attack
from fedsim.auditing.audit import Audit, ProgressOf, open_audit
from fedsim.auditing.plan import ADAPTIVE
from fedsim.errors import AttackError, ConfigError, KnowledgeError, RunError, TranscriptError
from fedsim.experiments.build import build_attacks
from fedsim.experiments.config import AttackFile, AttackTable, check
from fedsim.experiments.run_folder import RunFolder
from fedsim.findings import Finding
from fedsim.plugins import registry
from fedsim.plugins.objects import is_gone, is_object
from fedsim.recording.finding_files import load_claim, read_about
from fedsim.recording.transcript import Transcript
from fedsim.workflow.adversaries import Adversary
from fedsim.workflow.logs import kept
from fedsim.workflow.objects import as_table, writable
from fedsim.workflow.work import make_ready

_WHERE = "run.attack"


def specified(
    base: AttackFile,
    transcript: Transcript,
    attack: str | Attack,
    *,
    victim: int | None,
    rounds: Sequence[int] | None,
    knowledge: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> AttackFile:
    """The attack file for one attack.

    Args:
        base: the run's own file: what it grants, and its victims and rounds where none are named here.
        rounds: which rounds to attack; only an attack on several rounds takes more than one.
        knowledge: facts to grant or to withhold.

    Raises:
        FedsimError: the attack, its settings, the victim or the rounds are not valid.
    """
    if not isinstance(knowledge, Mapping):
        raise ConfigError(f"{_WHERE}: knowledge: expected a dict, got {type(knowledge).__name__}")
    if "name" in settings:
        raise ConfigError(f"{_WHERE}: name: the attack is named by the first argument; leave this out")
    if isinstance(attack, str):
        table: dict[str, Any] = {"name": attack, **writable(settings, _WHERE)}
    else:
        if settings:
            raise ConfigError(f"{_WHERE}: {next(iter(settings))}: the attack is an object, which has its settings")
        table = as_table("attacks", attack, _WHERE)
    adversary = base.adversary.model_dump(mode="json", exclude_unset=True)
    if isinstance(model := knowledge.get("model"), str):
        registry.load_object(model)  # a module of this program, never one in the run folder
    adversary["knowledge"] = {**adversary.get("knowledge", {}), **writable(knowledge, f"{_WHERE}: knowledge")}
    adversary |= {"repeats": 1} | ({"workers": 1} if is_object(table["name"]) else {})
    alone = check(AttackFile, {"attack": [table]}, _WHERE)
    [(own, built)] = build_attacks(alone)
    adversary["rounds"] = _rounds(base, transcript, rounds, temporal=built.temporal)
    chosen = base.adversary.victims
    first = chosen[0] if isinstance(chosen, list) else transcript.clients(adversary["rounds"][0])[0]
    adversary["victims"] = [first if victim is None else victim]
    tables = [*_sources(base, built.builds_on), own]
    told = [each.model_dump(mode="json", exclude_unset=True) for each in tables]
    own_words = {"app": base.app.model_dump(mode="json", exclude_unset=True), "truth": base.truth}
    return check(AttackFile, {"adversary": adversary, "attack": told, **own_words}, _WHERE)


def made(
    path: Path, base: AttackFile, adversary: Adversary, *, trust: bool, follow: ProgressOf | None
) -> tuple[Finding, dict[str, Any]]:
    """Make the last attack that `adversary` names, score all findings of the run, and return the new one.

    Where the adversary knows the clients' defenses and the attack reads them, it is made without and with them, and the
    finding is that with them.

    Args:
        base: the run's own file, whose attacks say which other findings are of the present code and settings.

    Raises:
        KnowledgeError: the attack cannot be made; nothing was attacked.
        AttackError: the attack failed.
        RunError: something could not be scored; the finding is kept.
    """
    spec = adversary.spec
    assert spec is not None
    audit = open_audit(path, spec, adversary.beside, trust=trust, command=adversary.command)
    with audit.folder.held(), kept(audit.folder.log):
        make_ready(audit)
        if (why := audit.refused.get(spec.attack[-1].title)) is not None:  # but not what it builds on
            raise KnowledgeError(why)
        failures = audit.run(follow)
        titles = {table.title for table in spec.attack}
        others = [table for table in base.attack if table.title not in titles and not is_gone(table.name)]
        whole = spec.model_copy(update={"attack": [*others, *spec.attack]})
        unscored: list[str] = []
        open_audit(path, whole, adversary.beside, trust=trust).score(unscored)
    if failures:
        raise AttackError("; ".join(failures))
    title = _adaptive(spec.attack[-1].title, audit)
    found = _newest(audit.folder, spec, title, audit.cache.variants[title])
    if unscored:
        raise RunError("; ".join([*unscored, f"what was found is kept in {found}"]))
    return load_claim(found)


def _adaptive(title: str, audit: Audit) -> str:
    """The title under which the adversary made the attack who knows the defenses, where one does; or `title`."""
    adaptive = f"{title} {ADAPTIVE}"
    return adaptive if adaptive in (table.title for table, _ in audit.attacks) else title


def _rounds(base: AttackFile, transcript: Transcript, rounds: Sequence[int] | None, *, temporal: bool) -> list[int]:
    """Which rounds to attack: those that are named, else those of the file."""
    if rounds is not None:
        if len(rounds) != 1 and not temporal:
            raise ConfigError(f"{_WHERE}: this attack reads one round, got {list(rounds)}; name one")
        return list(rounds)
    own = transcript.rounds if base.adversary.rounds == "all" else base.adversary.rounds or transcript.rounds[:1]
    return list(own) if temporal else list(own[:1])


def _sources(base: AttackFile, title: str | None) -> list[AttackTable]:
    """The attack called `title` in the run's own file, and those that it builds on, in the order of work."""
    named = {table.title: (table, attack) for table, attack in build_attacks(base)} if title else {}
    found: list[AttackTable] = []
    while title in named and named[title][0] not in found:
        table, attack = named[title]
        found.insert(0, table)
        title = attack.builds_on
    return found


def _newest(folder: RunFolder, spec: AttackFile, title: str, variant: str) -> Path:
    """The file of the finding that this attack made, now or before with the same settings and knowledge."""
    victims, rounds = spec.adversary.victims, spec.adversary.rounds
    for path in sorted(folder.findings.glob("*/*.safetensors")):
        with suppress(TranscriptError):  # a damaged file of another attack, which scoring has reported
            about = read_about(path)
            same = about["attack"] == title and about["variant"] == variant and about["repeat"] == 0
            whom = {about["victim"], *about.get("members", ())}
            if same and isinstance(victims, list) and whom.issuperset(victims) and about["rounds"] == rounds:
                return path
    raise RunError(f"{folder.findings}: what '{title}' found of clients {victims} is not there; attack again")
