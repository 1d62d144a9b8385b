"""An attack that fails on a victim is kept in the run until it succeeds there, and everything names it."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import fedsim
from adversaries.exact.analytic import Analytic
from fedsim.base.errors import AttackError, RunError
from fedsim.federation.failed_attacks import FailedAttack
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder
from fedsim.report.failed_attacks import describe_failed_attacks
from fedsim.report.index_entry import FAILED, FINISHED
from fedsim.report.run_index import index_folder
from tests.support.commands import Call

RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 1},
    "model": {"name": "linear"},
    "training": {"local_steps": 1, "batch_size": 1, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 3, "rounds": 1},
    "adversary": {"victims": [0, 1, 2], "rounds": [1], "workers": 1},
    "attack": [{"name": "analytic"}],
}
WHY = "the layer <script>alert(1)</script> of {0} is \x1b[31mflat"
"""Error of a stranger's code, with markup of pages, of formats and of terminals."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose attack failed on clients 1 and 2."""
    attack_client = Analytic._run

    def fail_on_others(self: Analytic, target: Any, progress: Any) -> Any:
        if target.victim != 0:
            raise AttackError(WHY)
        return attack_client(self, target, progress)

    folder = tmp_path_factory.mktemp("runs") / "a"
    with patch.object(Analytic, "_run", fail_on_others), pytest.raises(RunError, match="analytic, round 1, client 1: "):
        fedsim.run(RUN, folder)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(original, tmp_path / "runs" / "a"))


def read_failures(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the table of failed attacks."""
    with RunFolder(folder).failures.open(newline="") as file:
        return list(csv.DictReader(file))


def read_missing(folder: Path) -> list[dict[str, Any]]:
    """Return what a dossier lists as without a result."""
    missing: list[dict[str, Any]] = json.loads((folder / "dossier.json").read_text())["dossier"]["missing"]
    return missing


def test_a_run_keeps_each_victim_that_an_attack_failed_on(original: Path) -> None:
    row = {"attack": "analytic", "round": "1", "victim": "1", "repeat": "0", "why": WHY}
    assert read_failures(original) == [row, row | {"victim": "2"}]
    assert OpenRun(original).manifest.vouches_for(RunFolder(original).failures)


def test_the_report_names_them_with_the_error_escaped(original: Path) -> None:
    page = (original / "report.html").read_text()
    assert "analytic failed on client 1 (round 1), client 2 (round 1): the layer &lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page


def test_errors_that_name_their_round_and_client_are_one_sentence() -> None:
    failed = [
        FailedAttack(attack="sme", round="1", victim=victim, repeat=0, why=f"round 1, client {victim}: no ReLU follows")
        for victim in (3, 4)
    ]
    assert describe_failed_attacks(failed) == ["sme failed on client 3 (round 1), client 4 (round 1): no ReLU follows"]


def test_the_index_says_that_the_run_failed(original: Path, call: Call) -> None:
    [entry] = index_folder(original.parent).entries
    reason = f"analytic failed on client 1 (round 1), client 2 (round 1): {WHY}"
    assert (entry.state, entry.reasons) == (FAILED, [reason])
    printed = call("index", original.parent).stdout
    assert "failed" in printed
    assert "\x1b" not in printed
    page = (original.parent / "index.html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_summary_has_a_row_for_what_failed(original: Path) -> None:
    *scored, failed = fedsim.open(original).summary().to_dict("records")
    assert {row["verdict"] for row in scored} != {"failed"}
    assert (failed["attack"], failed["metric"], failed["victims"], failed["verdict"]) == ("analytic", "", 2, "failed")
    assert failed["why"].endswith(WHY)


def test_a_dossier_says_why_an_attack_has_no_result(original: Path) -> None:
    fedsim.write_dossier(original)
    why = f"it failed on client 1 (round 1), client 2 (round 1): {WHY}"
    assert read_missing(original) == [{"attack": "analytic", "why": why, "is_failure": True}]
    assert "<script>alert(1)" not in (original / "dossier.html").read_text()


def test_a_failure_that_is_struck_out_by_hand_is_noticed(run: Path) -> None:
    fedsim.write_dossier(run)
    path = RunFolder(run).failures
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert fedsim.verify_dossier(run).differences
    with pytest.raises(RunError, match=r"failed\.csv: is not what this run wrote"):
        fedsim.open(run).summary()
    [entry] = index_folder(run.parent).entries
    assert "failed.csv: is not what this run wrote" in entry.problems[0]


def test_a_damaged_table_is_refused_with_its_remedy(run: Path) -> None:
    path = RunFolder(run).failures
    path.write_text(path.read_text().replace(",1,1,0,", ",1,one,0,"))
    with pytest.raises(RunError, match=r"failed\.csv: .*has 'one' in place of a count"):
        fedsim.open(run).summary()


def test_a_failure_that_later_succeeds_is_reported_no_longer(run: Path, call: Call) -> None:
    result = call("attack", run, "--set", "adversary.victims=[1]")
    assert result.returncode == 0, result.stderr
    assert [row["victim"] for row in read_failures(run)] == ["2"]
    assert call("attack", run).returncode == 0
    assert read_failures(run) == []
    assert "failed on" not in (run / "report.html").read_text()
    [entry] = index_folder(run.parent).entries
    assert (entry.state, entry.reasons) == (FINISHED, [])
    assert "failed" not in set(fedsim.open(run).summary()["verdict"])
    fedsim.write_dossier(run)
    assert read_missing(run) == []
