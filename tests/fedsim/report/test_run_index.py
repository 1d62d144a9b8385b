"""The index of a folder of runs: what it says of each, what it leaves out, and that nothing ends it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fedsim.audit.evaluation.score import Score
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.base.errors import ConfigError, RunError
from fedsim.cli import index as cli_index
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.manifest import ManifestFile
from fedsim.recording.sealed_files import write_sealed_file
from fedsim.report.index_entry import IndexEntry
from fedsim.report.run_index import PAGE, index_folder, write_index_page
from fedsim.sweeps.table import write_cells, write_table
from tests.support.commands import Call
from tests.support.silent_messages import row_of
from tests.support.sweep_tables import LEAKING, make_rows

TABLES: dict[str, Any] = {
    "model": {"name": "mlp"},
    "training": {"local_epochs": 3, "batch_size": 5},
    "federation": {"clients": 6, "rounds": 2},
    "defense": [{"name": "top-k", "fraction": 0.5}],
    "attack": [{"name": "dlg"}],
}


def make_run(path: Path, *, rounds: int = 2, psnr: Sequence[float] = LEAKING, **tables: Any) -> OpenRun:
    """Write what a run leaves that has done `rounds` rounds, and whose attack has these scores."""
    folder = OpenRun(path)
    with folder.hold_lock():
        folder.prepare(resume=False, overwrite=False)
        folder.write_experiment(validate_tables(Config, TABLES | tables, "x"))
        columns = ("round", "client", "accuracy", "loss", "guess", "num_examples", "failed", "seconds")
        row = dict(zip(columns, (2, "server", 0.75, 0.5, 0.125, 400, 0, 1.0), strict=True))
        folder.write_table(folder.metrics, columns, [row])
        rows = []
        for victim, value in enumerate(psnr):
            row = row_of(Score.against_guesses("psnr", value, {"noise": 10.0}), victim, 4) | {"attack": "dlg"}
            del row["title"]  # which `name_variants` adds
            rows.append(row)
        if rows:
            folder.write_table(folder.scores, SCORE_COLUMNS, rows)
        write_sealed_file(folder.checkpoint, {"round": rounds}, {})
    folder.report.write_text("report")
    return folder


def read_one(folder: Path) -> IndexEntry:
    [entry] = index_folder(folder).entries
    return entry


def test_an_entry_says_what_was_run_and_what_leaked(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    entry = read_one(tmp_path)
    assert (entry.data, entry.model, entry.clients, entry.rounds) == ("digits", "mlp", "6", "2")
    assert (entry.training, entry.defenses, entry.attacks) == ("E = 3 local epochs, B = 5", "top-k", "dlg")
    assert (entry.verdict, entry.sentence) == ("leaks", "By PSNR, dlg finds a leak.")
    assert (entry.accuracy, entry.guess, entry.no_learning) == (0.75, 0.125, "")
    assert (entry.state, entry.problems, entry.page) == ("finished", [], "report.html")
    assert re.fullmatch(r"\d+\.\d+\.\d+", entry.version)


def test_the_first_verdict_is_the_worst(tmp_path: Path) -> None:
    make_run(tmp_path / "a", psnr=[9.0, 9.5, 9.2, 9.4, 9.1, 9.3])
    assert read_one(tmp_path).verdict == "no better than guessing"


@pytest.mark.parametrize(
    ("settings", "state", "reason"),
    [
        ({"rounds": 1}, "unfinished", "1 of 2 rounds are done"),
        ({"psnr": []}, "unfinished", "no scores of dlg"),
        ({"attack": [{"name": "dlg"}, {"name": "sme"}]}, "failed", "no scores of sme"),
        ({"psnr": [], "adversary": {"when": "never"}}, "finished", ""),
    ],
)
def test_the_state_says_how_far_a_run_came(tmp_path: Path, settings: dict[str, Any], state: str, reason: str) -> None:
    make_run(tmp_path / "a", **settings)
    entry = read_one(tmp_path)
    assert (entry.state, entry.reasons) == (state, [reason] if reason else [])


def test_a_refused_attack_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", psnr=[])
    folder.refusals.write_text("attack,why\ndlg,it needs labels\n")
    entry = read_one(tmp_path)
    assert (entry.state, entry.reasons) == ("failed", ["it needs labels"])


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("manifest.json", "{}", "manifest.json"),
        ("experiment.toml", "[data", "experiment.toml"),
        ("experiment.toml", "[federation]\nclients = 'x'\n", "federation.clients"),
        ("metrics.csv", "round,client\n", "metrics.csv: is not what this run wrote"),
        ("scores.csv", "attack\ndlg\n", "scores.csv: is not what this run wrote"),
        ("versions.json", "[1]", "TypeError"),
        ("checkpoint.safetensors", "x", "checkpoint.safetensors: is damaged"),
    ],
)
def test_damage_of_one_file_hides_nothing_else(tmp_path: Path, file: str, text: str, problem: str) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "a" / file).write_text(text)
    make_run(tmp_path / "b")
    damaged, intact = sorted(index_folder(tmp_path).entries, key=lambda entry: entry.name)
    assert intact.problems == []
    assert damaged.shown_state == "damaged"
    assert any(problem in sentence for sentence in damaged.problems), damaged.problems
    assert damaged.model == ("" if file == "experiment.toml" else "mlp")
    assert damaged.verdict == ("" if file in ("scores.csv", "manifest.json") else "leaks")


def test_results_that_no_manifest_vouches_for_are_not_believed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    folder.manifest.path.unlink()
    entry = read_one(tmp_path)
    assert entry.shown_state == "damaged"
    assert (entry.verdict, entry.sentence, entry.model) == ("", "", "mlp")
    assert entry.accuracy != entry.accuracy
    [problem] = entry.problems
    assert "manifest.json: is not there, so nothing proves the run whole" in problem


@pytest.mark.parametrize("name", ["scores", "metrics"])
def test_results_that_the_manifest_does_not_name_are_not_believed(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "a")
    path: Path = getattr(folder, name)
    with folder.manifest.edit() as manifest:
        del manifest.files[path.name]
    [problem] = read_one(tmp_path).problems
    assert f"{path.name}: is not what this run wrote" in problem


def test_results_that_were_removed_are_missed(tmp_path: Path) -> None:
    make_run(tmp_path / "a").scores.unlink()
    [problem] = read_one(tmp_path).problems
    assert "scores.csv: is not there, although this run wrote it" in problem


def test_attacks_of_an_attack_file_are_named_beside_those_of_the_experiment(tmp_path: Path) -> None:
    make_run(tmp_path / "a", attack=[{"name": "sme"}])
    assert read_one(tmp_path).attacks == "sme, dlg"


def test_a_link_in_a_run_is_not_followed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    folder.scores.rename(tmp_path / "elsewhere.csv")
    folder.scores.symlink_to(tmp_path / "elsewhere.csv")
    entry = read_one(tmp_path)
    assert entry.verdict == ""
    assert "scores.csv: is a symbolic link" in entry.problems[0]


def test_nothing_that_a_run_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "intruder.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = make_run(tmp_path / "runs" / "a")
    text = folder.experiment.read_text()
    folder.experiment.write_text(
        text.replace('name = "dlg"', 'name = "intruder:Attack"').replace('label = ""', 'label = "dlg"')
    )
    folder.manifest.note(folder.experiment)
    entry = read_one(tmp_path / "runs")
    assert (entry.attacks, entry.verdict, entry.problems) == ("dlg", "leaks", [])
    assert not Path("imported").exists()


def test_folders_without_a_run_are_counted_and_links_and_cells_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "mine" / "deep" / "a")
    (tmp_path / "mine" / "notes" / "old").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "experiment.toml").write_text("[data]\n")
    make_run(tmp_path / "cells" / "attacks" / "b")
    (tmp_path / "cells" / "federations").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    index = index_folder(tmp_path)
    assert [entry.name for entry in index.entries] == ["mine/deep/a"]
    assert (index.num_skipped, index.num_stores) == (4, 1)


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "c", "a")):
        os.utime(make_run(tmp_path / name).experiment, (10**9 - age, 10**9 - age))
    assert [entry.name for entry in index_folder(tmp_path).entries] == ["b", "c", "a"]


def test_runs_of_an_app_and_bare_recordings_are_entries(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "round-00001.safetensors").touch()
    for number in (1, 2):
        (tmp_path / "app" / f"run-{number}" / "transcript").mkdir(parents=True)
        ManifestFile(tmp_path / "app" / f"run-{number}").start()
    names = {entry.name: entry.shown_state for entry in index_folder(tmp_path).entries}
    assert names == {"app/run-1": "finished", "app/run-2": "finished", "bare": "finished"}


def make_sweep(folder: Path) -> None:
    folder.mkdir()
    (folder / "sweep.toml").write_text("[sweep]\nseeds = [1]\n[federation]\nclients = 7\n")
    write_table(folder, ("defense", "model.name"), make_rows(LEAKING, **{"model.name": "mlp"}))
    cell = {"cell": "c", "defense": "none", "model.name": "mlp", "seed": 1, "attack": "sme", "state": "failed"}
    write_cells(folder, ("defense", "model.name"), [cell])


def test_a_sweep_is_one_entry_with_its_answer(tmp_path: Path) -> None:
    make_sweep(tmp_path / "sweep")
    entry = read_one(tmp_path)
    assert (entry.kind, entry.data, entry.model, entry.clients) == ("sweep", "digits", "varies", "7")
    assert (entry.attacks, entry.defenses, entry.state) == ("sme", "1 setting", "failed")
    assert (entry.reasons, entry.accuracy, entry.guess) == (["1 cell failed"], 0.9, pytest.approx(0.1))
    assert "leak" in entry.sentence


def test_the_page_escapes_names_and_leads_to_reports(tmp_path: Path) -> None:
    make_run(tmp_path / "a <b> & #1")
    text = write_index_page(index_folder(tmp_path)).read_text()
    assert '<a href="a%20%3Cb%3E%20%26%20%231/report.html">a &lt;b&gt; &amp; #1</a>' in text
    assert "<b>" not in text
    assert "By PSNR, dlg finds a leak." in unescape(text)
    assert 'data-value="0.75"' in text
    assert "75.0\u00a0%" in text
    assert "guess 12.5\u00a0%" in text


def test_an_index_of_somebody_else_stays(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    index = index_folder(tmp_path)
    page = write_index_page(index)
    assert write_index_page(index) == page
    page.write_text("<!DOCTYPE html><title>mine</title>")
    with pytest.raises(RunError, match=r"index\.html: was not written by `fedsim index`"):
        write_index_page(index)
    assert page.read_text() == "<!DOCTYPE html><title>mine</title>"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nowhere", "no such folder"), ("empty", "holds no runs"), ("runs/a", "is a single run or sweep")],
)
def test_a_folder_that_cannot_be_indexed_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    make_run(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=sentence):
        index_folder(tmp_path / name)


def test_the_command_prints_a_short_table_and_where_the_page_is(tmp_path: Path, call: Call) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "[b]", rounds=1)
    (tmp_path / "empty").mkdir()
    result = call("index", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert ["a", "leaks", "75.0", "%", "finished"] in lines
    assert ["[b]", "leaks", "75.0", "%", "unfinished"] in lines
    assert "left out: 1 folder that holds no run\n" in result.stdout
    assert result.stdout.endswith(f"page: {tmp_path / PAGE}\n")


def test_the_command_says_of_a_sweep_the_best_accuracy_and_the_beginning_of_its_answer(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path / "sweep")
    monkeypatch.setattr(cli_index, "_MAX_LETTERS", 16)
    text = re.sub(r"\s+", " ", call("index", tmp_path).stdout)
    assert "sweep The messages ... 90.0 % at best failed" in text
