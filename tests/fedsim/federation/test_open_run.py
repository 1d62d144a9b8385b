"""A run folder is read and verified once in a command, and stays right beside others that write there."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedsim.api import pipeline
from fedsim.api.adversaries import read_adversary
from fedsim.federation import open_run
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.recording import transcript
from fedsim.recording.manifest import ManifestFile
from tests.support.experiments import make_tiny_config, run_serial

Counts = Counter[str]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_tiny_config(attack=[{"name": "shared-model"}], adversary={"when": "at-end", "workers": 1})
    return run_serial(config, tmp_path_factory.mktemp("made") / "run").path


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How often the manifest was verified and the experiment file read."""
    counts: Counts = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def count_call(*arguments: Any) -> Any:
            counts[what] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, count_call)

    count(ManifestFile, "_parse", "manifest")
    count(open_run, "read_toml", "settings")
    return counts


@pytest.mark.parametrize("overrides", [[], pytest.param(["adversary.victims=[1]"], marks=pytest.mark.thorough)])
def test_an_attack_verifies_manifest_and_settings_once(run: Path, reads: Counts, overrides: list[str]) -> None:
    folder = OpenRun(run)
    done = pipeline.attack(folder, read_adversary(folder, None, overrides))
    assert done.failures == []
    assert reads["manifest"] == 1
    assert reads["settings"] == 1 if not overrides else reads["settings"] <= 2  # noted for the run, and read again


def test_a_report_verifies_manifest_and_settings_once(run: Path, reads: Counts) -> None:
    assert pipeline.report(OpenRun(run)).failures == []
    assert reads == {"manifest": 1, "settings": 1}


def test_headers_are_read_once_for_audit_and_integrity(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = list[int](), transcript.read_header
    monkeypatch.setattr(transcript, "read_header", lambda path, number: read.append(number) or real(path, number))
    folder = OpenRun(run)
    assert folder.recording.in_format(transcript.MessageFormat(message=1)).clients(1) == folder.recording.clients(1)
    assert compare_with_manifest(folder).differences == []
    assert sorted(read) == folder.recording.rounds


def test_what_another_process_noted_is_of_the_run(run: Path) -> None:
    """Attacks in processes of their own write findings while this one holds the manifest that it read before."""
    ours, theirs = ManifestFile(run), ManifestFile(run)
    assert ours.contents is not None
    (run / "scores.csv").write_text("attack\n")
    assert not ours.vouches_for(run / "scores.csv")
    theirs.note(run / "scores.csv")
    assert ours.vouches_for(run / "scores.csv")


def test_changes_of_two_writers_are_both_kept(run: Path) -> None:
    ours, theirs = ManifestFile(run), ManifestFile(run)
    assert ours.contents is not None
    for name, file in {"scores.csv": theirs, "refused.csv": ours, "geometry.csv": theirs}.items():
        (run / name).write_text("attack\n")
        file.note(run / name)
    noted = ManifestFile(run).contents
    assert noted is not None
    assert {"scores.csv", "refused.csv", "geometry.csv"} <= set(noted.files)


def test_a_table_that_was_replaced_is_not_of_the_run_any_more(run: Path) -> None:
    """Whoever puts it back has changed the run, whichever command had written the tables."""
    folder = OpenRun(run)
    folder.write_table(folder.geometry, ["round"], [{"round": 1}])
    replaced = folder.geometry.read_text()
    folder.write_table(folder.geometry, ["round"], [{"round": 2}])
    assert compare_with_manifest(OpenRun(run)).differences == []
    folder.geometry.write_text(replaced)
    assert compare_with_manifest(OpenRun(run)).differences == ["geometry.csv is not what was written"]


def test_an_edit_that_fails_leaves_what_is_on_the_disk(run: Path) -> None:
    manifest = ManifestFile(run)

    def fail() -> None:
        with manifest.edit() as changed:
            changed.seed = 99
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert manifest.contents is not None
    assert manifest.contents.seed == 3


def test_what_was_read_before_the_lock_is_read_again_where_it_changed(run: Path) -> None:
    folder = OpenRun(run)
    assert folder.config.federation.rounds == 2
    assert folder.manifest.contents is not None
    text = folder.experiment.read_text().replace("rounds = 2", "rounds = 5")
    folder.experiment.write_text(text)
    (run / "scores.csv").write_text("attack\n")
    ManifestFile(run).note(run / "scores.csv")
    with folder.hold_lock():
        assert folder.config.federation.rounds == 5
        assert "scores.csv" in folder.manifest.contents.files
