"""A single attack on one client of a recorded run, made from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsim.api.adversaries import Adversary
from fedsim.api.objects import as_plain_values, as_table
from fedsim.api.pipeline import begin_audit
from fedsim.audit.audit import Audit, make_audit
from fedsim.audit.finding_files import load_claim, read_facts
from fedsim.audit.plan import ADAPTIVE, ReportJobProgress
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError, RunError, TranscriptError
from fedsim.federation.adversary_tables import AdversaryTable, AttackTable
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.findings import Finding
from fedsim.plugins import registry
from fedsim.plugins.inline import is_lost_object, is_object
from fedsim.recording.transcript import Transcript

_WHERE = "run.attack"
"""Where errors say that they are."""


def single_attack_file(
    base: AttackFile,
    transcript: Transcript,
    attack: str | Attack,
    *,
    victim: int | None,
    rounds: Sequence[int] | None,
    knowledge: Mapping[str, Any],
    who: Any,
    settings: Mapping[str, Any],
) -> AttackFile:
    """Return the attack file for one attack.

    Args:
        base: the run's own file: what it grants, and its victims and rounds where none are named here.
        rounds: which rounds to attack; only an attack on several rounds takes more than one.
        knowledge: facts to grant or to withhold.
        who: attacks; None is who attacks by the run's own file.
    """
    if not isinstance(knowledge, Mapping):
        raise ConfigError(f"{_WHERE}: knowledge: expected a dict, got {type(knowledge).__name__}")
    if "name" in settings:
        raise ConfigError(f"{_WHERE}: name: the attack is named by the first argument; leave this out")
    if isinstance(attack, str):
        table: dict[str, Any] = {"name": attack, **as_plain_values(settings, _WHERE)}
    else:
        if settings:
            raise ConfigError(f"{_WHERE}: {next(iter(settings))}: the attack is an object, which has its settings")
        table = as_table("attacks", attack, _WHERE)
    adversary = base.adversary.model_dump(mode="json", exclude_unset=True)
    if isinstance(model := knowledge.get("model"), str):
        registry.load_object(model)  # a module of this program, never one in the run folder
    adversary["knowledge"] = {**adversary.get("knowledge", {}), **as_plain_values(knowledge, f"{_WHERE}: knowledge")}
    adversary |= {} if who is None else {"who": list(who) if isinstance(who, tuple) else who}
    adversary |= {"repeats": 1} | ({"workers": 1} if is_object(table["name"]) else {})
    # Build the attack, which says how many rounds it reads and which other attack it builds on.
    single_attack = validate_tables(AttackFile, {"attack": [table]}, _WHERE)
    [(attack_table, built)] = build_attacks(single_attack)
    adversary["rounds"] = _rounds(base, transcript, rounds, built)
    adversary["victims"] = [_default_victim(base, transcript, adversary) if victim is None else victim]
    attack_tables = [*_sources(base, built.builds_on), attack_table]
    dumped = [item.model_dump(mode="json", exclude_unset=True) for item in attack_tables]
    recording = {"app": base.app.model_dump(mode="json", exclude_unset=True), "truth": base.truth}
    return validate_tables(AttackFile, {"adversary": adversary, "attack": dumped, **recording}, _WHERE)


def _default_victim(base: AttackFile, transcript: Transcript, adversary: Mapping[str, Any]) -> int:
    """Return the first victim of the file, or the first that is recorded, who is not among those who attack."""
    victims = base.adversary.victims
    candidates = victims if isinstance(victims, list) else transcript.clients(adversary["rounds"][0])
    role = validate_tables(AdversaryTable, {"who": adversary.get("who", "server")}, _WHERE).role
    others = [client for client in candidates if client not in role.colluders]
    if role.links:
        others = [client for client in others if client in role.links]
    return (others or candidates)[0]


def make_finding(
    folder: OpenRun, base: AttackFile, adversary: Adversary, *, trust: bool, follow: ReportJobProgress | None
) -> tuple[Finding, dict[str, Any]]:
    """Make the last attack that `adversary` names, score all findings of the run, and return the new one.

    Where the adversary knows the clients' defenses and the attack reads them, it is made without and with them, and the
    finding is that with them.

    Args:
        base: the run's own file, whose attacks say which other findings are of the present code and settings.
    """
    spec = adversary.spec
    assert spec is not None
    with begin_audit(folder, adversary, trust=trust) as audit:
        if (reason := audit.refusal_reasons.get(spec.attack[-1].title)) is not None:  # but not what it builds on
            raise KnowledgeError(reason)
        failures = audit.run(follow)
        titles = {table.title for table in spec.attack}
        other_attacks = [table for table in base.attack if table.title not in titles and not is_lost_object(table.name)]
        all_attacks = spec.model_copy(update={"attack": [*other_attacks, *spec.attack]})
        unscored: list[str] = []
        make_audit(folder, all_attacks, adversary.beside, trust=trust).score(unscored)
    if failures:
        raise AttackError("; ".join(failures))
    title = _title_of_finding(spec.attack[-1].title, audit)
    finding_file = _find_finding(folder, spec, title, audit.cache.variants[title])
    if unscored:
        raise RunError("; ".join([*unscored, f"what was found is kept in {finding_file}"]))
    return load_claim(finding_file)


def _title_of_finding(title: str, audit: Audit) -> str:
    """Return the title of the adaptive attack, where one was made; else `title`."""
    adaptive_title = f"{title} {ADAPTIVE}"
    return adaptive_title if adaptive_title in (table.title for table, _ in audit.attacks) else title


def _rounds(base: AttackFile, transcript: Transcript, rounds: Sequence[int] | None, attack: Attack) -> list[int]:
    """Return which rounds to attack: those that are named, else those of the file."""
    if rounds is not None:
        if len(rounds) != 1 and attack.reads_one_round():
            raise ConfigError(f"{_WHERE}: this attack reads one round, got {list(rounds)}; name one")
        return list(rounds)
    file_rounds = (
        transcript.rounds if base.adversary.rounds == "all" else base.adversary.rounds or transcript.rounds[:1]
    )
    return list(file_rounds[:1]) if attack.reads_one_round() else list(file_rounds)


def _sources(base: AttackFile, title: str | None) -> list[AttackTable]:
    """Return the attack called `title` in the run's own file, and those that it builds on, in the order of work."""
    attacks = {table.title: (table, attack) for table, attack in build_attacks(base)} if title else {}
    sources: list[AttackTable] = []
    while title in attacks and attacks[title][0] not in sources:
        table, attack = attacks[title]
        sources.insert(0, table)
        title = attack.builds_on
    return sources


def _find_finding(folder: RunFolder, spec: AttackFile, title: str, variant: str) -> Path:
    """Return the file of the finding that this attack made, now or before with the same settings and knowledge."""
    victims, rounds = spec.adversary.victims, spec.adversary.rounds
    for path in sorted(folder.findings.glob("*/*.safetensors")):
        with suppress(TranscriptError):  # a damaged file of another attack, which scoring has reported
            about = read_facts(path)
            same_attack = about["attack"] == title and about["variant"] == variant and about["repeat"] == 0
            clients = {about["victim"], *about.get("members", ())}
            same_victims = isinstance(victims, list) and clients.issuperset(victims)
            if same_attack and same_victims and about["rounds"] == rounds:
                return path
    raise RunError(f"{folder.findings}: what '{title}' found of clients {victims} is not there; attack again")
