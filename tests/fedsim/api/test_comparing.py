"""`fedsim.compare`: what differs between runs, from what their folders hold."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.base.errors import ConfigError
from fedsim.cli.compare import compare
from fedsim.cli.options import console
from fedsim.interfaces.attack import Attack, Paper, Target
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins.code_hashes import UNREADABLE
from fedsim.recording.wire_format import State
from fedsim.report.differences import SEEN_LESS

EXPERIMENT: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 1, "test_fraction": 0.2},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"local_epochs": 1, "batch_size": 1, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 2, "rounds": 2},
    "adversary": {"victims": "all", "rounds": [1], "workers": 1},
    "attack": [{"name": "inverting-gradients", "iterations": 3, "restarts": 1}, {"name": "spear"}],
}
NOISE = {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one alone, one with noise, on which the exact attack fails, one of another seed."""
    home = tmp_path_factory.mktemp("runs")
    fedsim.run(EXPERIMENT, home / "plain")
    with pytest.raises(fedsim.FedsimError, match="spear"):
        fedsim.run({**EXPERIMENT, "defense": [NOISE]}, home / "noisy")
    fedsim.run(EXPERIMENT, home / "other", set={"federation.seed": 4})
    return home


def test_settings_and_accuracy_stand_side_by_side(folder: Path) -> None:
    found = fedsim.compare(folder / "plain", folder / "noisy")
    assert repr(found) == "Comparison('plain', 'noisy')"
    assert found.differing_settings["defense.0.name"] == [None, "update-noise"]
    assert all(key.startswith("defense.0.") for key in found.differing_settings)
    assert list(found.settings.columns) == ["plain", "noisy"]
    assert list(found.quality.index) == [1, 2]
    assert (found.quality["plain"] != found.quality["noisy"]).any()


def test_models_that_clients_have_of_their_own_are_not_taken_for_a_shared_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**EXPERIMENT, "algorithm": {"name": "fedper"}, "adversary": {"when": "never"}, "attack": []}
    fedsim.run(own, tmp_path / "own", set={"partition.samples_per_client": 20})
    compare([folder / "plain", tmp_path / "own"], out=tmp_path / "page.html")
    text = capsys.readouterr().out
    assert "plain: accuracy 0." in text
    assert "own: accuracy of the clients' own models " in text
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy of the model" in page
    assert "Accuracy of the clients' own models" in page or "Accuracy of the clients&#39; own models" in page


def test_settings_are_named_in_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fact of the granted knowledge has its own row, and no key is cut short, however narrow the terminal is."""
    found = fedsim.compare(folder / "plain", folder / "other")
    one, two = found.sides
    knowledge = {"labels": False, "defenses": False}
    before = replace(one, settings=one.settings | {"adversary.knowledge": knowledge})
    after = replace(two, settings=two.settings | {"adversary.knowledge": knowledge | {"labels": True}})
    changed = replace(found, sides=(before, after))
    assert changed.differing_settings["adversary.knowledge.labels"] == [False, True]
    assert "adversary.knowledge.defenses" not in changed.differing_settings
    monkeypatch.setattr(console, "width", 50)
    compare([folder / "plain", folder / "noisy"])
    settings_table = capsys.readouterr().out.partition("accuracy")[0]
    assert "noise_mult" in settings_table
    assert "…" not in settings_table


def test_scores_are_paired_by_victim(folder: Path) -> None:
    runs = fedsim.open(folder / "plain"), fedsim.open(folder / "noisy")
    rows = fedsim.compare(*(run.path for run in runs)).scores.set_index(["attack", "metric"])
    row = rows.loc["inverting-gradients", "psnr"]
    one, two = (
        run.scores[(run.scores["attack"] == "inverting-gradients") & (run.scores["metric"] == "psnr")]["value"].mean()
        for run in runs
    )
    assert row["difference"] == pytest.approx(two - one)
    assert (row["count"], row["unit"], row["paired"]) == (2, "victim", True)
    assert row["verdict"] in (SEEN_LESS, "neither, as far as seen", "more, as far as seen")


def test_an_attack_that_a_defense_stopped_is_named(folder: Path) -> None:
    found = fedsim.compare(folder / "plain", folder / "noisy")
    assert found.unshared_attacks("noisy") == (["spear"], [])


def test_clients_of_another_seed_are_not_paired(folder: Path) -> None:
    rows = fedsim.compare(folder / "plain", folder / "other").scores
    assert not rows["paired"].any()
    assert rows[rows["metric"] == "psnr"]["remark"].str.contains("federation.seed differs").all()


def test_a_damaged_run_is_named_and_the_others_are_compared(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "noisy", tmp_path / "damaged")
    scores = tmp_path / "damaged" / "scores.csv"
    scores.write_text(scores.read_text().replace("psnr", "snr"))
    found = fedsim.compare(folder / "plain", tmp_path / "damaged", folder / "other")
    assert [side.name for side in found.sides] == ["plain", "other"]
    (failure,) = found.failures
    assert "damaged/scores.csv: is not what this run wrote" in failure
    with pytest.raises(ConfigError, match="fewer than two of these runs can be read"):
        fedsim.compare(folder / "plain", tmp_path / "damaged")


def test_an_experiment_file_that_was_changed_is_no_comparison(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "noisy", tmp_path / "changed")
    file = tmp_path / "changed" / "experiment.toml"
    file.write_text(file.read_text().replace("noise_multiplier = 0.5", "noise_multiplier = 5.0"))
    found = fedsim.compare(folder / "plain", folder / "other", tmp_path / "changed")
    assert "the run was made with 0.5, but now it says 5.0" in found.failures[0]


def test_runs_of_one_name_are_told_apart_by_their_folders(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "plain", tmp_path / "plain")
    found = fedsim.compare(folder / "plain", tmp_path / "plain")
    assert [side.name for side in found.sides] == [f"{folder.name}/plain", f"{tmp_path.name}/plain"]
    assert not found.differing_settings
    assert (found.scores["difference"].dropna() == 0).all()


def test_equal_runs_are_equal_in_a_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "plain", tmp_path / "twin")
    compare([folder / "plain", tmp_path / "twin"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "equal" in line] == [lines[-1]]
    assert lines[-1].startswith("twin compared with plain: equal: all scores of inverting-gradients, spear, by ")
    assert lines[-1].endswith(" over 2 victims")
    assert len(lines) == 4
    page = fedsim.compare(folder / "plain", tmp_path / "twin").report(tmp_path / "page.html").path.read_text()
    assert "Equal: all scores of inverting-gradients" in page
    assert "<caption>" not in page
    compare([folder / "plain", folder / "noisy"])
    assert "equal: all scores" not in capsys.readouterr().out


def foreign(run: Path, copy: Path) -> Path:
    """A copy of a run as if its recording had been made elsewhere."""
    shutil.copytree(run, copy)
    (copy / "experiment.toml").unlink()
    return copy


def test_settings_of_recordings_made_elsewhere_are_unknown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (foreign(folder / "plain", tmp_path / name) for name in ("one", "two"))
    both = fedsim.compare(one, two)
    assert not both.differing_settings
    assert "All settings are the same" not in both.report(tmp_path / "page.html").path.read_text()
    assert both.about_settings == [
        f"{n} was recorded elsewhere, so its settings are not known." for n in ("one", "two")
    ]

    mixed = fedsim.compare(folder / "plain", one, folder / "noisy")
    assert mixed.differing_settings["defense.0.name"] == [None, "unknown", "update-noise"]
    text = mixed.report(tmp_path / "page.html").path.read_text()
    assert "<td>not set</td><td>unknown</td><td>update-noise</td>" in text
    same = fedsim.compare(folder / "plain", one)
    assert not same.differing_settings
    assert "one was recorded elsewhere" in same.report(tmp_path / "page.html").path.read_text()

    compare([one, two])
    printed = capsys.readouterr().out
    assert "two was recorded elsewhere" in printed
    assert "All settings are the same" not in printed


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["plain"], "expected two runs or more, got 1"),
        (["plain", "plain"], "is named twice"),
        (["plain", "nowhere"], "nowhere: no such run folder"),
        (["plain", "."], "holds no run"),
    ],
)
def test_requests_that_make_no_sense(folder: Path, names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fedsim.compare(*(folder / name for name in names))


def test_the_page_shows_settings_verdicts_and_pictures(folder: Path, tmp_path: Path) -> None:
    found = fedsim.compare(folder / "plain", folder / "noisy")
    text = found.report(tmp_path / "page.html").path.read_text()
    assert "defense.0.noise_multiplier" in text
    assert "Only plain has scores of: spear." in " ".join(text.split())
    pictures = (folder / "plain" / "findings").glob("*/*.png"), (folder / "noisy" / "findings").glob("*/*.png")
    assert text.count("data:image/png") == sum(len(list(some)) for some in pictures) > 4
    assert "nothing was found" in text
    assert "have the same clients" not in text
    other = fedsim.compare(folder / "plain", folder / "other").report(tmp_path / "other.html").path.read_text()
    assert "Not all these runs have the same clients" in other


def test_the_page_escapes_names_and_failures(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "plain", tmp_path / "<b>x")
    (tmp_path / "<i>y").mkdir()
    found = fedsim.compare(folder / "plain", tmp_path / "<b>x", tmp_path / "<i>y")
    text = found.report(tmp_path / "page.html").path.read_text()
    assert "&lt;b&gt;x" in text
    assert "<b>x" not in text
    assert "&lt;i&gt;y: holds no run" in text


@dataclass(frozen=True, kw_only=True)
class Halves(Defense):
    """Sends half of the update."""

    paper = Paper(title="T", authors="A", venue="V", year=2020)

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor / 2 for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class Black(Attack):
    """Claims one black image."""

    paper = Paper(title="T", authors="A", venue="V", year=2020)
    needs = frozenset({"input_shape"})

    def _run(self, target: Target, progress: object) -> Reconstruction:
        assert target.knowledge.input_shape is not None
        return Reconstruction(data=torch.zeros(1, *target.knowledge.input_shape), labels=torch.zeros(1).long())


def test_other_code_of_one_name_is_said(folder: Path, tmp_path: Path) -> None:
    """Else a difference that it makes would be one between equal runs."""
    fedsim.run({**EXPERIMENT, "defense": [Halves()], "attack": [Black()]}, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    both = fedsim.compare(tmp_path / "one", tmp_path / "two")
    one, two = both.sides
    assert one.code.keys() == {f"{__name__}:Halves", "Black"}
    assert both.about_settings == ["All settings are the same."]
    other = replace(two, code={**two.code, "Black": frozenset({"0"}), f"{__name__}:Halves": frozenset({UNREADABLE})})
    assert replace(both, sides=[one, other]).about_settings == [
        "All settings are the same.",
        "The code of Black is not the same in two as in one.",
        f"The code of {__name__}:Halves may not be the same in two as in one.",
    ]
