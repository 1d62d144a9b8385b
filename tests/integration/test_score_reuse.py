"""Scores in a run folder are kept where nothing changed that they follow from, and made anew where something did."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.api import pipeline
from fedsim.audit import score_reuse, scores
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.federation.config import AttackFile
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.shared import make_once

TABLES: dict[str, Any] = {
    "adversary": {"victims": [0, 2], "rounds": [1], "workers": 1},
    "attack": [{"name": "sme", "iterations": 2}],
}


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose findings have scores."""

    def make(folder: Path) -> None:
        run_serial(make_tiny_config(partition={"samples_per_client": 4}), folder / "run")
        attack(folder / "run", TABLES)

    return make_once(tmp_path_factory, "scored-run", make) / "run"


@pytest.fixture
def run(scored_run: Path, tmp_path: Path) -> Path:
    """A copy of it to do anything to."""
    return Path(shutil.copytree(scored_run, tmp_path / "run"))


@pytest.fixture
def judgements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attack and victim of each finding that is judged from now on."""
    names: list[str] = []
    judge = scores._judge

    def note(finding: Any, about: Any, *given: Any) -> Any:
        names.append(f"{about['attack']} {about['victim']}")
        return judge(finding, about, *given)

    monkeypatch.setattr(scores, "_judge", note)
    return names


def attack(run: Path, tables: dict[str, Any]) -> list[dict[str, str]]:
    """Attack, score, and return the rows as texts, as NaN is no number."""
    audit = open_audit(run, validate_tables(AttackFile, tables, "attack.toml"))
    audit.run()
    return [{name: str(value) for name, value in row.items()} for row in audit.score()]


def test_a_further_attack_leaves_scores_as_they_are(run: Path, judgements: list[str]) -> None:
    before, images = (run / "scores.csv").read_text(), (run / "image-scores.csv").read_text()
    rows = attack(run, TABLES)
    assert judgements == []
    assert ((run / "scores.csv").read_text(), (run / "image-scores.csv").read_text()) == (before, images)
    with_another = TABLES | {"attack": [*TABLES["attack"], {"name": "dlfa", "iterations": 2}]}
    more_rows = attack(run, with_another)
    assert judgements
    assert {name.split()[0] for name in judgements} == {"dlfa"}
    assert [row for row in more_rows if row["attack"] == "sme"] == rows
    judgements.clear()
    shutil.rmtree(run / "findings" / "dlfa")
    assert attack(run, TABLES) == rows
    assert judgements == []


def test_a_report_scores_nothing_again(run: Path, judgements: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **how: Any) -> float:
        raise AssertionError("a report computes a gradient")

    monkeypatch.setattr(AttackedUpdate, "_distance", refuse)
    rows = (run / "scores.csv").read_text()
    done = pipeline.report(OpenRun(run))
    assert not done.failures
    assert (run / "report.html").is_file()
    assert judgements == []
    assert (run / "scores.csv").read_text() == rows


def test_rows_are_equal_to_those_that_are_made_anew(run: Path) -> None:
    rows = attack(run, TABLES)
    (run / "score-inputs.json").unlink()
    assert attack(run, TABLES) == rows


def edit_scores(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "scores.csv"
    path.write_text(path.read_text().replace("sme,0,1", "sme,0,1", 1) + "\n")


def edit_images(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "image-scores.csv").unlink()


def edit_inputs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "score-inputs.json"
    path.write_text(path.read_text() + " ")


def edit_fedsim(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reuse, "hash_own_checkout", lambda: "edited")


def edit_versions(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reuse, "versions", lambda: {"torch": "99"})


def edit_metrics(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reuse, "hash_metric_code", lambda: {"mine": "123"})


def edit_modality(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reuse, "_hash_foreign_code", lambda group: {"mine": "1"} if group == "modalities" else {})


def edit_finding_kind(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reuse, "_hash_foreign_code", lambda group: {"mine": "1"} if group == "findings" else {})


EDITS = [edit_scores, edit_inputs, edit_fedsim, edit_metrics]
MORE_EDITS = [edit_images, edit_versions, edit_modality, edit_finding_kind]


@pytest.mark.parametrize(
    "edit",
    [*EDITS, *(pytest.param(edit, marks=pytest.mark.thorough) for edit in MORE_EDITS)],
    ids=lambda edit: edit.__name__,
)
def test_what_scores_follow_from_has_them_made_anew(
    edit: Callable[[Path, pytest.MonkeyPatch], None],
    run: Path,
    judgements: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit(run, monkeypatch)
    attack(run, TABLES)
    assert len(judgements) == 2


def test_a_finding_that_changed_is_scored_anew_alone(
    run: Path, judgements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file = score_reuse.cached_file_hash
    monkeypatch.setattr(
        score_reuse, "cached_file_hash", lambda path: "other" if "client-2" in path.name else hash_file(path)
    )
    attack(run, TABLES)
    assert judgements == ["sme 2"]


def test_further_victims_and_threat_models_count(run: Path, judgements: list[str]) -> None:
    attack(run, TABLES | {"adversary": TABLES["adversary"] | {"knowledge": {"labels": True}}})
    assert len(judgements) == 4, "what the evaluator is told of the adversary changed"


@pytest.mark.parametrize(
    "group", ["metrics", *(pytest.param(group, marks=pytest.mark.thorough) for group in ("modalities", "findings"))]
)
def test_unreadable_code_is_never_taken_for_unchanged(
    group: str, run: Path, judgements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = score_reuse.hash_scoring_code() | {group: {"mine": score_reuse.UNREADABLE}}
    monkeypatch.setattr(score_reuse, "hash_scoring_code", lambda: hashes)
    attack(run, TABLES)
    attack(run, TABLES)
    assert len(judgements) == 4
