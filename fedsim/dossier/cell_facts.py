"""What the runs of a sweep's cells say of a dossier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.base.errors import FedsimError
from fedsim.dossier.attack_results import describe_coverage, read_finding_facts
from fedsim.dossier.contents import Coverage, MeasuredEpsilon, Proof, to_float
from fedsim.dossier.privacy_facts import collect_measured_epsilons, collect_proofs
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.run_facts import run_facts
from fedsim.report.sweep_groups import Row

_TEXTS_OF_COVERAGE = ("rounds", "granted", "unusual", "victim_data", "withheld")


@dataclass
class CellFacts:
    """What the runs of a sweep's cells say.

    Attributes:
        holds_sums: whether the server of any run saw sums over groups alone.
        settings: what was run in the first one, term by term.
        problems: a sentence for each run that is gone, damaged or not as it was written.
    """

    findings: list[dict[str, Any]] = field(default_factory=list)
    coverages: list[Coverage] = field(default_factory=list)
    proofs: dict[str, list[Proof]] = field(default_factory=dict)
    no_proofs: dict[str, str] = field(default_factory=dict)
    measured: list[MeasuredEpsilon] = field(default_factory=list)
    holds_sums: list[bool] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_cell_facts(path: Path, rows_by_name: Mapping[str, Sequence[Row]], *, trust: bool) -> CellFacts:
    """Read what the runs of all cells say; a setting's proofs are of the run in which most was spent."""
    facts = CellFacts()
    for name, rows in rows_by_name.items():
        for folder in dict.fromkeys(row["run"] for row in rows if row["run"]):
            try:
                run = open_reported_run(OpenRun(path / folder), trust=trust)
                _add_cell(facts, run, name)
            except FedsimError as error:
                facts.problems.append(f"{name}: the run of a cell cannot be read: {error}.")
    return facts


def _add_cell(facts: CellFacts, run: ReportedRun, setting: str) -> None:
    if differences := compare_with_manifest(run.folder).differences:
        facts.problems.append(f"{setting}: the run of a cell is not the one that was written: {differences[0]}.")
    if not facts.settings:
        for term, text in run_facts(run).items():
            if text:
                facts.settings[f"{term}, first cell"] = text
    findings = read_finding_facts(run)
    facts.findings += findings
    facts.coverages.append(describe_coverage(run, findings))
    facts.holds_sums.append(run.recording.holds_sums)
    proofs, no_proof = collect_proofs(run, setting)
    if _largest_epsilon(proofs) >= _largest_epsilon(facts.proofs.get(setting, [])):
        facts.proofs[setting] = proofs
    facts.no_proofs[setting] = no_proof
    facts.measured += collect_measured_epsilons(run, setting)


def _largest_epsilon(proofs: Sequence[Proof]) -> float:
    return max((to_float(proof.epsilon) for proof in proofs), default=0.0)


def merge_coverages(coverages: Sequence[Coverage]) -> Coverage:
    """Return what was attacked in any run; of clients and rounds, as many as the largest run has."""
    clients = recorded_rounds = 0
    victims, attacked_rounds = set[int](), set[int]()
    texts: dict[str, dict[str, None]] = {name: {} for name in _TEXTS_OF_COVERAGE}
    for coverage in coverages:
        clients = max(clients, coverage.clients)
        recorded_rounds = max(recorded_rounds, coverage.recorded_rounds)
        victims.update(coverage.victims)
        attacked_rounds.update(coverage.attacked_rounds)
        for name, distinct in texts.items():
            distinct |= dict.fromkeys(getattr(coverage, name))
    lists = {name: list(distinct) for name, distinct in texts.items()}
    return Coverage(
        clients=clients,
        recorded_rounds=max(recorded_rounds, len(attacked_rounds)),
        victims=sorted(victims),
        attacked_rounds=sorted(attacked_rounds),
        **lists,
    )
