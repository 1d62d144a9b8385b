"""The dossier of a sweep speaks of its defended settings, and is computed again from its cells."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.sweeps.table import read_cells, read_table, write_cells, write_table
from tests.fedsim.api.test_sweeping import stay_here
from tests.support.commands import Call
from tests.support.runs import read_dossier

SWEEP: dict[str, Any] = {
    "sweep": {
        "axes": {
            "attack": [{"name": "analytic"}],
            "defense": [[], [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0}], [{"name": "top-k"}]],
        },
        "workers": 1,
    },
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 1},
    "model": {"name": "linear"},
    "training": {"local_steps": 1, "batch_size": 1, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 5, "rounds": 1},
    "adversary": {"victims": "all", "workers": 1},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its cells beside it, and its dossier."""
    home = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patched:
        stay_here(patched)
        fedsim.sweep(SWEEP, home / "sweep", cells=home / "cells")
    fedsim.write_dossier(home / "sweep", fail_if=["leaks", "psnr>1000"])
    return home


@pytest.fixture
def sweep(original: Path, tmp_path: Path) -> Path:
    """A copy of the sweep, for a test that changes it."""
    shutil.copytree(original, tmp_path / "home")
    return tmp_path / "home" / "sweep"


def test_it_answers_for_each_defense_beside_the_undefended_control(original: Path) -> None:
    content = read_dossier(original / "sweep")
    rows = {row["name"]: row for row in content["settings"]}
    assert rows["none"]["verdict"] == "leaks"
    assert not rows["none"]["is_defended"]
    assert rows["dp-sgd"]["is_defended"]
    assert rows["dp-sgd"]["difference"]
    assert rows["dp-sgd"]["accuracy_change"]
    [proof] = content["proofs"]
    assert (proof["setting"], proof["neighbours"]) == ("dp-sgd", "one example added or removed")
    assert content["no_proof"] == (
        "none: No guarantee is proved, because clients have no defense. top-k: No guarantee is proved for top-k."
    )
    assert content["coverage"]["clients"] == 5


def test_thresholds_leave_out_the_undefended_control(original: Path, tmp_path: Path) -> None:
    dossier = fedsim.write_dossier(original / "sweep", tmp_path, fail_if=["exact>0.9", "epsilon>8"]).contents
    exact = {result.setting: result.worst for result in dossier.results if result.metric == "exact"}
    assert exact["none"] is not None
    assert exact["none"].value == 1
    assert {item.threshold: item.why for item in dossier.thresholds}["epsilon>8"] == (
        "epsilon is ∞ (no guarantee is proved for top-k)"
    )
    defended = [worst.value for setting, worst in exact.items() if setting != "none" and worst is not None]
    assert dossier.thresholds[0].observed == max(defended)


def test_every_number_is_equal_to_those_of_the_cells(original: Path, call: Call) -> None:
    done = call("verify", original / "sweep")
    assert done.returncode == 0, done.stderr
    verification = fedsim.verify_dossier(original / "sweep")
    assert len(verification.cells) > 50
    assert {value.state for value in verification.values} == {"equal"}


@pytest.mark.thorough
def test_a_table_that_was_written_anew_does_not_follow_from_the_cells(sweep: Path, call: Call) -> None:
    table = read_table(sweep)
    changed = [row | ({"value": "12.5"} if row["metric"] == "psnr" else {}) for row in table.rows]
    write_table(sweep, table.axes, changed)
    fedsim.write_dossier(sweep)
    verification = fedsim.verify_dossier(sweep)
    assert not [value for value in verification.contents if value.state == "differs"]
    assert {value.found == "12.5" for value in verification.differences} == {False}
    assert len(verification.differences) == sum(row["metric"] == "psnr" for row in table.rows)
    assert call("verify", sweep).returncode == 1


def test_a_row_that_was_taken_out_is_missed(sweep: Path) -> None:
    table = read_table(sweep)
    write_table(sweep, table.axes, [row for row in table.rows if row["victim"] != "3"])
    fedsim.write_dossier(sweep)
    differences = fedsim.verify_dossier(sweep).differences
    assert differences
    assert all("client 3" in value.where for value in differences)


def test_exact_claims_are_called_exact(original: Path) -> None:
    page = (original / "sweep" / "dossier.html").read_text(encoding="utf-8")
    assert re.search(r'>analytic <span class="small">none</span>.*?<td class="number">exact</td>', page)


def test_cells_without_all_results_get_one_sentence(sweep: Path) -> None:
    table = read_cells(sweep)
    cells = [row | ({"state": "failed"} if row["defense"] != "none" else {}) for row in table.rows]
    write_cells(sweep, table.axes, cells)
    sentences = fedsim.write_dossier(sweep).contents.answer
    assert "Results of some cells are missing (failed in part): analytic in 2 of 3." in sentences
    assert not any("lack results" in sentence for sentence in sentences)


def test_without_a_cell_there_is_no_verdict(sweep: Path, call: Call) -> None:
    with (sweep / "cells.csv").open(newline="") as file:
        run = next(row["run"] for row in csv.DictReader(file) if row["defense"] == "top-k")
    shutil.rmtree(sweep / run)
    done = call("dossier", sweep, "--fail-if", "leaks")
    assert done.returncode == 1
    assert "files of the run were changed" in done.stderr
    content = read_dossier(sweep)
    assert content["verdict"] == "nothing can be said"
    assert "top-k: the run of a cell cannot be read" in content["notes"][0]
