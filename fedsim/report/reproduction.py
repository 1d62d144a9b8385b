"""How to reproduce a report: files for `fedsim run` and `fedsim attack`, and what else they need.

The files state every setting that the findings were made with, as their headers record it, so they make the same
findings even where a later version has other defaults. They hold names of files without folders, since a path is only
valid on the machine that made the run; `Reproduction.requirements` says where those files have to be put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import tomli_w

from fedsim.audit.audit import Audit
from fedsim.base.errors import FedsimError, name_rounds
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.report.finding_views import FindingView
from fedsim.report.recording_summary import Recording
from fedsim.report.reported_run import ReportedRun
from fedsim.report.reproduction_files import attack_files, attack_table, file_title
from fedsim.report.reproduction_needs import ReferencedFiles, metric_origins, plugin_origins
from fedsim.report.summary import join_titles

_RERUN_FOLDER = "runs/again"
"""Run folder in the commands."""
_LEFT_OUT: Any = {"federation": {"address", "reply_memory"}, "truth": True, "app": True}
"""Keys that an experiment file need not state: where Flower or Ray listened, tables of a recording made elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """File that makes findings, or the run itself, once more.

    Attributes:
        attacks: titles of the findings that it makes.
        command: command that reads it.
    """

    name: str
    text: str
    attacks: Sequence[str]
    command: str


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Everything that a reader needs to reproduce a report.

    Attributes:
        downloads: the files, in the order of their commands.
        requirements: a sentence for each thing that the files need, or that no file can reproduce.
        hashes: by name of the finding, SHA-256 of what it claims.
        hash: SHA-256 over `hashes`; empty where there are none.
    """

    downloads: Sequence[Download]
    requirements: Sequence[str]
    hashes: Sequence[tuple[str, str]]
    hash: str


def reproduction_of(run: ReportedRun) -> Reproduction:
    """Return the files that reproduce the findings of `run`, each finding by one of the files."""
    has_experiment = run.experiment is not None
    files, failed = ReferencedFiles(), list[str]()
    downloads, written_tables = list[Download](), list[Mapping[str, Any]]()
    for tables, items in _tables_of_files(run):
        tables_without_paths = files.replace_paths(tables)
        attacks = attack_titles(items)
        try:
            known_tables = {
                name: tables_without_paths[name] for name in AttackFile.model_fields if name in tables_without_paths
            }
            validate_tables(AttackFile, known_tables, "a file")
            downloads.append(_download(len(downloads), tables_without_paths, attacks, has_experiment=has_experiment))
            written_tables.append(tables_without_paths)
        except (FedsimError, TypeError, ValueError) as error:  # a stranger's finding may say anything of itself
            failed.append(f"{join_titles(attacks)}: its recorded settings fit no file ({error}).")
    hashes = sorted((finding_name(item), item.hash) for item in run.findings)
    hash_of_all = sha256("".join(f"{name} {digest}\n" for name, digest in hashes).encode()).hexdigest()
    foreign_code = plugin_origins(written_tables) + metric_origins(row["metric"] for row in run.scores)
    return Reproduction(
        downloads=downloads,
        requirements=[*files.sentences(), *foreign_code, *failed],
        hashes=hashes,
        hash=hash_of_all if hashes else "",
    )


def _tables_of_files(run: ReportedRun) -> Iterator[tuple[dict[str, Any], list[FindingView]]]:
    """Yield the tables of each file with the findings it makes: the run's own file, then files built from findings."""
    audit, remaining = run.audit, list(run.findings)
    run_audit = experiment_audit(audit) if audit else None
    if run_audit:
        yield _experiment_file(run_audit, run.recording, remaining)
    for tables, items in attack_files(remaining, run.findings, audit, _clients_by_round(run.recording)):
        truth = {"truth": audit.spec.truth} if audit and audit.spec.truth else {}
        yield tables | truth, items


def _clients_by_round(recording: Recording) -> dict[int, set[int]]:
    """Return by round the clients whose single update was recorded."""
    clients = {}
    for header in recording.headers:
        clients[header.round] = {reply.client for reply in header.replies if not reply.members}
    return clients


def experiment_audit(audit: Audit) -> Audit | None:
    """Return the audit that the run's own experiment describes; None for a recording made elsewhere."""
    if audit.config is None or audit.spec is audit.config:
        return audit if audit.config else None
    return replace(audit, spec=audit.config, base_folder=audit.folder.path)


def finding_name(finding: FindingView) -> str:
    """Name a finding by attack, round, victim and random start."""
    about = finding.about
    rounds = name_rounds(about["round"])
    return f"{about['attack']}, {rounds}, client {about['victim']}, start {int(about['repeat']) + 1}"


def attack_titles(findings: Iterable[FindingView]) -> list[str]:
    """List what the attacks of these findings are called in the report, each once."""
    return list(dict.fromkeys(str(finding.about["attack"]) for finding in findings))


def _download(position: int, tables: Mapping[str, Any], attacks: Sequence[str], *, has_experiment: bool) -> Download:
    if has_experiment and position == 0:
        name, command = "experiment.toml", f"fedsim run experiment.toml --out {_RERUN_FOLDER}"
    else:
        name = f"attack-{position if has_experiment else position + 1}.toml"
        command = f"fedsim attack {_RERUN_FOLDER if has_experiment else 'RUN'} {name}"
    return Download(name=name, text=f"# {command}\n\n{tomli_w.dumps(tables)}", attacks=attacks, command=command)


def _experiment_file(
    audit: Audit, recording: Recording, remaining: list[FindingView]
) -> tuple[dict[str, Any], list[FindingView]]:
    """Return a run's experiment file and the findings that it makes, which are taken out of `remaining`."""
    planned = _take(remaining, _plan_filter(audit, recording))
    dumped = audit.spec.model_dump(mode="json", exclude_none=True, exclude=_LEFT_OUT)
    tables = {name: table for name, table in dumped.items() if table not in ([], {})}
    if not planned or tables["adversary"]["when"] == "never":
        tables["adversary"]["when"] = "at-end" if planned else "never"
    return _with_full_attack_tables(tables, planned), planned


def _with_full_attack_tables(tables: dict[str, Any], findings: Sequence[FindingView]) -> dict[str, Any]:
    """Write out all settings of the attacks that made `findings`, not only those that the author chose."""
    about_by_title = {file_title(finding.about): finding.about for finding in findings}
    attack_tables = []
    for table in tables.get("attack", []):
        name = table.get("label") or table["name"]
        attack_tables.append(attack_table(about_by_title[name]) if name in about_by_title else table)
    return tables | ({"attack": attack_tables} if attack_tables else {})


def _take(remaining: list[FindingView], is_wanted: Callable[[FindingView], bool]) -> list[FindingView]:
    """Remove the wanted findings from `remaining` and return them."""
    taken, rest = list[FindingView](), list[FindingView]()
    for finding in remaining:
        (taken if is_wanted(finding) else rest).append(finding)
    remaining[:] = rest
    return taken


def _plan_filter(audit: Audit, recording: Recording) -> Callable[[FindingView], bool]:
    """Return a test for findings that the file of `audit` makes; none pass where its attacks cannot be built."""
    adversary = audit.spec.adversary
    try:
        attacks, variants = {table.title: attack for table, attack in audit.attacks}, audit.cache.variants
    except FedsimError:
        return lambda item: False
    recorded = sorted([*(header.round for header in recording.headers), *recording.damaged])
    attacked_rounds = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]

    def planned_victims(rounds: Sequence[int]) -> set[int]:
        replies = [reply for header in recording.headers if header.round in rounds for reply in header.replies]
        clients = {client for reply in replies for client in (reply.client, *reply.members)}
        return clients if adversary.victims == "all" else set(adversary.victims or sorted(clients)[:1])

    def is_planned(finding: FindingView) -> bool:
        about, attack = finding.about, attacks.get(str(finding.about["title"]))
        if attack is None or variants[str(about["title"])] != about["variant"]:
            return False
        rounds = list(about["rounds"])
        if attack.reads_one_round():
            rounds_match = set(rounds) <= set(attacked_rounds)
        else:
            rounds_match = rounds == [number for number in attacked_rounds if number in recorded]
        clients = {about["victim"], *about["members"]}
        return rounds_match and about["repeat"] < adversary.repeats and bool(clients & planned_victims(rounds))

    return is_planned
