"""Dossier of a sweep, computed from its tables and from the runs of its cells."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.base.errors import FedsimError
from fedsim.base.files import hash_file
from fedsim.base.grouping import group_by
from fedsim.dossier.attack_results import (
    conclude,
    describe_coverage,
    describe_failures,
    describe_openness,
    describe_worst,
    make_result,
    read_finding_facts,
)
from fedsim.dossier.contents import (
    NOTHING_KNOWN,
    Coverage,
    Dossier,
    Evidence,
    HashedFile,
    MeasuredEpsilon,
    MissingAttack,
    Proof,
    Result,
    SettingAnswer,
    to_float,
)
from fedsim.dossier.limits import describe_changes, describe_extent, describe_validity, list_pitfalls
from fedsim.dossier.parties import REFERENCES, list_aims, list_observers
from fedsim.dossier.privacy_facts import collect_measured_epsilons, collect_proofs, describe_proofs
from fedsim.dossier.run_dossier import DossierOptions
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.settings import versions
from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.report.defense_outcomes import read_scores
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.reproduction_needs import strip_folders
from fedsim.report.run_facts import run_facts
from fedsim.report.setting_names import SettingNames
from fedsim.report.summary import enumerate_words
from fedsim.report.sweep_answer import SweepAnswer, answer_sweep
from fedsim.report.sweep_groups import Row
from fedsim.report.sweep_lead import ONLY_SETTING
from fedsim.report.sweep_page import FILE
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.table import CELLS, TABLE, SweepTableFile, read_cells, read_table

_MAX_NAMED_CELLS = 5
_FINISHED = ("done", "does not apply")


def collect_sweep_dossier(path: Path, options: DossierOptions) -> Dossier:
    """Compute the dossier of a sweep; nothing is written."""
    table, cells = read_table(path), read_cells(path)
    answer = answer_sweep(table.rows, cells.rows, table.axes)
    rows_by_name = _group_by_setting(table)
    facts = read_cell_facts(path, rows_by_name, trust=options.trust)
    results = _collect_results(rows_by_name, answer.metric)
    missing = _list_missing_cells(cells.rows, (*table.axes, "attack", "seed"))
    unscored = _list_unscored_settings(rows_by_name, answer.metric)
    missing += unscored
    # Defended settings decide the verdict, where there are any.
    judged = [result for result in results if result.is_defended] or results
    verdict = conclude(judged, is_complete=not missing) if not facts.problems else NOTHING_KNOWN
    aims = list_aims(facts.findings)
    coverage = merge_coverages(facts.coverages)
    proofs = list(itertools.chain.from_iterable(facts.proofs.values()))
    no_proof = " ".join(f"{name}: {why}" for name, why in facts.no_proofs.items() if why)
    cautions, notes = list_pitfalls(lambda: EvaluationDesign.of_sweep(read_sweep(path / FILE), trust=options.trust))
    # What cannot be relied on comes first, then what leaked, what failed, and what is proved.
    sentences = [
        *(["Some cells have changed since they were written, so nothing below is reliable."] if facts.problems else []),
        answer.lead or "There are no scores, so it is unknown what the messages leak.",
        *answer.no_controls,
        *answer.defense_limits,
        *describe_worst(judged),
        *describe_openness(judged),
        *answer.failures,
        *describe_failures(unscored),
        *describe_extent(coverage),
        *(describe_proofs(proofs) or ["No guarantee is proved for any setting."]),
        _describe_learning(answer),
    ]
    return Dossier(
        kind="sweep",
        name=path.resolve().name,
        written=options.written,
        versions=versions(),
        review_by=options.review_by,
        verdict=verdict,
        answer=list(filter(None, sentences)),
        facts={
            "Axes": ", ".join((*table.axes, "attack", "seed")),
            "Cells": _count_states(cells.rows),
            **facts.settings,
        },
        observers=list_observers(facts.findings, holds_sums=bool(facts.holds_sums) and all(facts.holds_sums)),
        coverage=coverage,
        aims=aims,
        missing=missing,
        results=results,
        settings=[SettingAnswer.model_validate(row) for row in answer.rows],
        no_proof=no_proof,
        proofs=proofs,
        measured=facts.measured,
        exposed=[],
        accuracy=None,
        cautions=cautions,
        no_cautions=strip_folders(" ".join(notes)),
        changes=describe_changes(verdict, judged, missing, aims),
        validity=describe_validity(options.review_by),
        references=list(REFERENCES),
        notes=[strip_folders(note) for note in [*facts.problems, *notes]],
        thresholds=[],
        evidence=_collect_evidence(path, options.folder, facts.problems),
    )


def _group_by_setting(table: SweepTableFile) -> dict[str, Sequence[Row]]:
    """Return the rows of `sweep.csv` by the name of their setting."""
    rows_by_labels = group_by(table.rows, lambda row: tuple(row[axis] for axis in table.axes))
    names = SettingNames.from_labels(table.axes, rows_by_labels)
    rows_by_name: dict[str, Sequence[Row]] = {}
    for labels, rows in rows_by_labels.items():
        rows_by_name[names(labels) or ONLY_SETTING] = rows
    return rows_by_name


def _collect_results(rows_by_name: Mapping[str, Sequence[Row]], main_metric: str) -> list[Result]:
    """Return the results of each attack in each setting, naive and adaptive, by each metric."""
    results = []
    for name, rows in rows_by_name.items():
        is_defended = any(row["cell"] != row["control"] for row in rows)
        by_form = group_by(rows, lambda row: (row["attack"], row["knows_defenses"] == "1"))
        for (attack, adaptive), form_rows in by_form.items():
            metrics = {row["metric"] for row in form_rows} - {""}  # which is that of attacks that failed
            for metric in sort_metrics(metrics):
                scores = read_scores(form_rows, metric, adaptive=adaptive)
                if scores is None:
                    continue
                results.append(
                    make_result(
                        scores.reading,
                        form_rows,
                        is_first=metric == main_metric,
                        is_main=metric == main_metric,
                        setting=name,
                        is_defended=is_defended,
                        name=f"{attack}, knowing the defense" if adaptive else attack,
                    )
                )
    return results


def _list_missing_cells(cells: Sequence[Row], columns: Sequence[str]) -> list[MissingAttack]:
    """Return the cells without a result, and why."""
    missing = []
    for row in cells:
        if row["state"] != "done":
            name = ", ".join(f"{column} {row[column]}" for column in columns)
            why = strip_folders(f"{row['state']}: {row['reason']}" if row["reason"] else row["state"])
            missing.append(MissingAttack(attack=name, why=why, is_failure=row["state"] not in _FINISHED))
    return missing


def _list_unscored_settings(rows_by_name: Mapping[str, Sequence[Row]], main_metric: str) -> list[MissingAttack]:
    """Return the attacks whose main metric has no value in any cell of a setting."""
    missing = []
    for name, rows in rows_by_name.items():
        scored = [row for row in rows if row["metric"] == main_metric]
        for attack, rows_of_attack in group_by(scored, lambda row: row["attack"]).items():
            if not any(row["value"] for row in rows_of_attack):
                why = f"{describe_metric(main_metric).title} was not computed for any victim"
                missing.append(MissingAttack(attack=f"{attack} ({name})", why=why, is_failure=True))
    return missing


def _count_states(cells: Sequence[Row]) -> str:
    counts = Counter(row["state"] for row in cells)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _describe_learning(answer: SweepAnswer) -> str:
    """Say which settings have models that are not shown to have learnt; empty for none."""
    names = [row.name for row in answer.rows if row.no_learning]
    if not names:
        return ""
    return (
        f"It is not shown that the model has learnt with {enumerate_words(names)}, so leakage and accuracy there say "
        "little about a trained model."
    )


def _collect_evidence(path: Path, folder: Path, problems: Sequence[str]) -> Evidence:
    """Return the hashes of the tables; reading them has checked their seals."""
    files = [HashedFile(file=name, sha256=hash_file(path / name)) for name in (FILE, TABLE, CELLS)]
    integrity = (
        f"the tables {TABLE} and {CELLS} are what the sweep wrote, and the runs of all cells are those of their "
        "manifests"
    )
    return Evidence(
        folder=os.path.relpath(path.resolve(), folder.resolve()),
        run="",
        files=files,
        integrity=strip_folders(" ".join(problems[:_MAX_NAMED_CELLS])) or integrity,
        is_intact=not problems,
        data="",
        settings="",
        code={},
    )


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
