"""Dossier of a run, computed from what its folder holds."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedsim.audit.plan import ADAPTIVE
from fedsim.base.errors import number_of
from fedsim.base.files import hash_file
from fedsim.dossier.attack_results import (
    collect_results,
    conclude,
    describe_coverage,
    describe_failures,
    describe_openness,
    describe_worst,
    read_finding_facts,
)
from fedsim.dossier.contents import NOTHING_KNOWN, Caution, Dossier, Evidence, HashedFile, MissingAttack, Result
from fedsim.dossier.limits import describe_changes, describe_extent, describe_validity, list_pitfalls
from fedsim.dossier.missing_attacks import list_missing_attacks
from fedsim.dossier.parties import REFERENCES, list_aims, list_observers
from fedsim.dossier.privacy_facts import (
    collect_exposed_clients,
    collect_measured_epsilons,
    collect_proofs,
    describe_accuracy,
    describe_proofs,
)
from fedsim.federation.config import AttackFile
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.settings import versions
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.recording.manifest import Manifest
from fedsim.report.adaptive import defense_remarks
from fedsim.report.headline import headline
from fedsim.report.recovery import describe_recovery
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.reproduction_needs import strip_folders
from fedsim.report.run_facts import run_facts

_NOT_WRITTEN_SO = "This is not the run that was written, so nothing below can be relied on."
_VICTIM_IS_GROUP = (
    "A client number may mean the client's group, of which the server saw only the sum: recovered examples belong "
    "to some member."
)
_NOTHING_ATTACKED = "Nothing was attacked, so the attacks were not checked for pitfalls."
_NOT_AN_ATTACK_FILE = (
    "Some findings are of attacks that the run's own file does not name, so it was not checked for pitfalls."
)


@dataclass(frozen=True, kw_only=True)
class DossierOptions:
    """Options of a dossier.

    Attributes:
        review_by: when it has to be examined again; None for no date.
    """

    folder: Path
    written: datetime.date
    review_by: datetime.date | None = None
    trust: bool = False


def collect_run_dossier(path: Path, options: DossierOptions) -> Dossier:
    """Compute the dossier of a run; nothing is written."""
    run = open_reported_run(OpenRun(path), trust=options.trust)
    evidence = _collect_evidence(run, options.folder)
    findings = read_finding_facts(run)
    missing = list_missing_attacks(run, findings)
    results = collect_results(run)
    verdict = conclude(results, is_complete=not any(attack.is_failure for attack in missing))
    if not evidence.is_intact:
        verdict = NOTHING_KNOWN
    aims = list_aims(findings)
    coverage = describe_coverage(run, findings)
    proofs, no_proof = collect_proofs(run)
    accuracy = describe_accuracy(run)
    # What was measured beyond what is proved stands with the answer.
    broken = []
    for audit in run.epsilon_audits:
        if audit.is_broken:
            broken.append(f"{audit.sentence[:1].upper()}{audit.sentence[1:]}.")
    answer = [
        *([] if evidence.is_intact else [_NOT_WRITTEN_SO]),
        *_describe_leakage(run, results, missing, findings),
        *describe_extent(coverage),
        _VICTIM_IS_GROUP if run.recording.holds_sums and coverage.victims else "",
        *broken,
        *(describe_proofs(proofs) or [no_proof]),
        accuracy.sentence,
        accuracy.no_learning,
    ]
    facts = run_facts(run)
    cautions, no_cautions = _list_cautions(run, findings)
    return Dossier(
        kind="run",
        name=run.name,
        written=options.written,
        versions=versions(),
        review_by=options.review_by,
        verdict=verdict,
        answer=list(filter(None, answer)),
        facts=facts,
        observers=list_observers(findings, holds_sums=run.recording.holds_sums),
        coverage=coverage,
        aims=aims,
        missing=missing,
        results=results,
        settings=[],
        no_proof=no_proof,
        proofs=proofs,
        measured=collect_measured_epsilons(run),
        exposed=collect_exposed_clients(run),
        accuracy=accuracy,
        cautions=cautions,
        no_cautions=strip_folders(" ".join(no_cautions)),
        changes=[
            *describe_changes(verdict, results, missing, aims, can_sweep=run.config is not None),
            *defense_remarks(run.readings, run.audit),
        ],
        validity=describe_validity(options.review_by),
        references=list(REFERENCES),
        notes=[strip_folders(note) for note in dict.fromkeys([*run.notes, *run.failures, *no_cautions])],
        thresholds=[],
        evidence=evidence,
    )


def _collect_evidence(run: ReportedRun, folder: Path) -> Evidence:
    """Return the hashes of what the dossier follows from, and whether the run is the one that was written."""
    comparison = compare_with_manifest(run.folder)
    manifest = comparison.manifest or Manifest()
    paths = [
        run.folder.manifest.path,
        run.folder.experiment,
        run.folder.scores,
        run.folder.metrics,
        run.folder.ledger,
        run.folder.epsilons,
        run.folder.exposure,
        run.folder.refusals,
        run.folder.failures,
    ]
    files = [HashedFile(file=path.name, sha256=hash_file(path)) for path in paths if path.is_file()]
    settings = json.dumps(manifest.settings, sort_keys=True) if manifest.settings is not None else ""
    damaged = [f"round {number} is damaged" for number in run.recording.damaged]
    # The same whatever the run is called from.
    integrity = comparison.text.replace(f"{run.folder.path}{os.sep}", "")
    return Evidence(
        folder=os.path.relpath(run.folder.path.resolve(), folder.resolve()),
        run=manifest.run if comparison.manifest else "",
        files=files,
        integrity=strip_folders("; ".join([integrity, *damaged])),
        is_intact=not comparison.differences and not damaged,
        data=manifest.data,
        settings=sha256(settings.encode()).hexdigest() if settings else "",
        code=manifest.code,
    )


def _describe_leakage(
    run: ReportedRun,
    results: Sequence[Result],
    missing: Sequence[MissingAttack],
    findings: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Say what leaked, on the whole and of the most exposed clients, or why nothing can be said of it."""
    if not results:
        if not findings:
            reasons = [f"{attack.attack}: {attack.why}" for attack in missing]
            refused = f" ({'; '.join(reasons)})" if reasons else ""
            return [f"No attack left a finding{refused}, so it is unknown what the messages leak."]
        return [
            f"There are no scores ({number_of(len(findings), 'finding')}), for example because the clients' data are "
            "unknown, so it is unknown what the messages leak. Name truth files in [truth] of an attack file, and "
            "attack again."
        ]
    # The words do not depend on the data set, which a verifier may lack.
    are_texts = any(finding.get("kind") == "texts" for finding in findings)
    recovery = describe_recovery(run.readings, "texts" if are_texts else "examples", are_texts=are_texts)
    sentences = [recovery, headline(run.readings), *describe_worst(results)]
    return sentences + describe_openness(results) + describe_failures(missing)


def _list_cautions(run: ReportedRun, findings: Sequence[Mapping[str, Any]]) -> tuple[list[Caution], list[str]]:
    """Return the pitfalls of the run's experiment, or of how another's app was attacked, and why there are none."""
    config = run.config
    if config is None:
        return _list_cautions_of_attacks(run, findings)
    titles = {str(finding["title"]) for finding in findings}
    planned = {table.title for table in config.attack}
    if not titles <= planned | {f"{title} {ADAPTIVE}" for title in planned}:
        return [], [_NOT_AN_ATTACK_FILE]
    return list_pitfalls(lambda: EvaluationDesign(specs=[config]))


def _list_cautions_of_attacks(
    run: ReportedRun, findings: Sequence[Mapping[str, Any]]
) -> tuple[list[Caution], list[str]]:
    """Return the pitfalls of attacks on another's app, whose attack file is read from what their findings say."""
    if not findings:
        return [], [_NOTHING_ATTACKED]
    attacks: dict[str, dict[str, Any]] = {}
    rounds, knowledge = set[int](), dict[str, Any]()
    for finding in findings:
        name, title = str(finding["plugin"]), str(finding["title"])
        attacks[title] = {"name": name, **({"label": title} if title != name else {}), **finding["changed"]}
        rounds.update(int(number) for number in finding["rounds"])
        knowledge |= dict(finding["knowledge"])
    # No pitfall depends on which network or loss it is, and those are code of the app.
    for fact in ("model", "loss"):
        knowledge[fact] = bool(knowledge.get(fact, False))
    adversary: dict[str, Any] = {
        "victims": sorted({int(finding["victim"]) for finding in findings}),
        "knowledge": knowledge,
    }
    recorded = sorted(header.round for header in run.recording.headers)
    if sorted(rounds) != recorded[:1]:  # the first one is attacked by default
        adversary["rounds"] = "all" if sorted(rounds) == recorded else sorted(rounds)

    def read_design() -> EvaluationDesign:
        tables = {"adversary": adversary, "attack": list(attacks.values())}
        spec = validate_tables(AttackFile, tables, run.name)
        check_trust(spec, run.folder.path, run.trust)
        return EvaluationDesign(specs=[spec])

    return list_pitfalls(read_design)
