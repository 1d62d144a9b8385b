"""A page says how it is made again, and what it says leads to the same recording and the same findings."""

from __future__ import annotations

import re
import shutil
import tomllib
from base64 import b64decode
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fedsim
from fedsim.api import pipeline
from fedsim.api.adversaries import read_adversary
from fedsim.audit.finding_files import read_facts
from fedsim.audit.variants import settings_of
from fedsim.base.files import hash_file
from fedsim.base.papers import Paper, find_entry
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from fedsim.report.finding_views import FindingView
from fedsim.report.panels.reproduction import FLOWER, bibtex
from fedsim.report.reported_run import open_reported_run
from fedsim.report.reproduction import reproduction_of
from fedsim.report.reproduction_files import attack_files, attack_table
from fedsim.report.reproduction_needs import strip_folders

TABLES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_epochs": 1, "batch_size": 3, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 3, "rounds": 2},
    "adversary": {"victims": [0], "repeats": 2, "workers": 1, "knowledge": {"labels": True}},
    "attack": [{"name": "inverting-gradients", "iterations": 2}, {"name": "sme", "iterations": 2, "label": "mine"}],
}


def downloads(page: str, kind: str = "application/toml") -> dict[str, str]:
    """What the links of a page hold, by the names under which a browser saves them."""
    found = re.findall(rf'<a download="([^"]+)" href="data:{re.escape(kind)};base64,([^"]*)"', page)
    return {unescape(name): b64decode(text).decode() for name, text in found}


def made_anew(page: str, folder: Path) -> tuple[Path, str]:
    """The run that the files of a page make, by the commands beside them, and its page."""
    files = downloads(page)
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    out = folder / "runs/again"
    for name in files:
        if name == "experiment.toml":
            assert f"fedsim run {name} --out runs/again" in page
            fedsim.run(folder / name, out=out)
        else:
            assert f"fedsim attack runs/again {name}" in page
            assert not pipeline.attack(OpenRun(out), read_adversary(OpenRun(out), folder / name)).failures
    return out, (out / "report.html").read_text(encoding="utf-8")


def claims(path: Path) -> dict[str, str]:
    """The hash of each finding of a run."""
    return dict(reproduction_of(open_reported_run(OpenRun(path))).hashes)


def fingerprints(path: Path) -> set[str]:
    return {read_facts(file)["fingerprint"] for file in path.glob("findings/*/*.safetensors")}


def read_definition(page: str, term: str) -> str:
    [text] = re.findall(rf"<dt>{term}</dt><dd>(.*?)</dd>", page)
    return text


@pytest.mark.thorough
def test_the_files_of_a_page_make_the_same_run_the_same_findings_and_the_same_page_again(tmp_path):
    run = fedsim.run(TABLES, out=tmp_path / "one")
    run.attack("sme", victim=2, round=2, iterations=2, knowledge={"labels": False})
    run.attack("inverting-gradients", victim=2, iterations=4)
    run.attack("analytic", victim=2)  # by the same adversary as the one before
    run.report()
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert list(downloads(page)) == ["experiment.toml", "attack-1.toml", "attack-2.toml"]

    again, other = made_anew(page, tmp_path / "files")
    assert Transcript(again).hash() == Transcript(run.path).hash() == read_definition(page, "SHA-256 of the recording")
    assert claims(again) == claims(run.path)
    assert len(claims(again)) == 2 * 2 + 3
    assert fingerprints(again) == fingerprints(run.path)
    assert read_definition(other, "SHA-256 of all findings") == read_definition(page, "SHA-256 of all findings")
    assert downloads(other) == downloads(page)


@pytest.mark.thorough
def test_an_adversary_who_knows_the_defenses_is_made_again_with_the_one_who_does_not(tmp_path):
    tables = TABLES | {
        "partition": TABLES["partition"] | {"samples_per_client": 1},
        "federation": TABLES["federation"] | {"clients": 2, "rounds": 1},
        "defense": [{"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.001}],
        "adversary": {"victims": [0], "workers": 1, "knowledge": {"defenses": True}},
        "attack": [{"name": "inverting-gradients", "iterations": 2}],
    }
    run = fedsim.run(tables, out=tmp_path / "one")
    run.attack("inverting-gradients", victim=1, iterations=3)
    run.report()
    page = (run.path / "report.html").read_text(encoding="utf-8")
    again, _ = made_anew(page, tmp_path / "files")
    assert claims(again) == claims(run.path)
    assert len(claims(again)) == 4


def found_in(*abouts: dict[str, Any]) -> list[FindingView]:
    """Findings that say so of themselves."""
    said = {"granted": [], "knowledge": {}, "app": {}, "members": [], "repeat": 0, "variant": ""}
    return [
        FindingView(
            about={**said, "attack": about["title"], **about}, hash="", curves={}, num_examples=0, has_truth=False
        )
        for about in abouts
    ]


def test_an_attack_on_models_that_others_decoded_takes_them_along():
    decoded = {"title": "decoded", "plugin": "lmra", "settings": {"degree": 2}, "knowledge": {"optimizer": True}}
    sia = {"title": "sia", "plugin": "sia", "settings": {"source": "decoded"}, "knowledge": {"records": True}}
    found = found_in(
        *({**decoded, "rounds": [1, 2, 3], "victim": victim} for victim in (0, 1)),
        {**sia, "rounds": [1, 2, 3], "victim": 1},
    )
    [(file, made)] = attack_files(found[2:], found, None, {})
    assert made == found[2:]
    assert file == {
        "adversary": {"victims": [1], "rounds": [1, 2, 3], "repeats": 1, "knowledge": {"records": True}},
        "attack": [{"name": "lmra", "label": "decoded", "degree": 2}, {"name": "sia", "source": "decoded"}],
    }


def test_findings_are_put_into_as_few_files_as_make_them_and_no_others():
    def of(title, rounds, victim, repeat=0, **knowledge):
        about = {"title": title, "plugin": title, "settings": {}, "rounds": rounds, "victim": victim, "repeat": repeat}
        return about | {"knowledge": knowledge, "variant": str(sorted(knowledge.items()))}

    def whom(*abouts, everyone=None):
        files = [file for file, _ in attack_files(found_in(*abouts), (), None, everyone or {})]
        return [
            (*(file["adversary"][key] for key in ("rounds", "victims", "repeats")), [t["name"] for t in file["attack"]])
            for file in files
        ]

    everyone = [of(name, [number], victim) for name in ("sme", "dlg") for number in (1, 2) for victim in (0, 1)]
    assert whom(*everyone) == [([1, 2], [0, 1], 1, ["dlg", "sme"])]
    assert whom(*everyone[1:]) == [
        ([1], [1], 1, ["sme"]), ([1, 2], [0, 1], 1, ["dlg"]), ([2], [0, 1], 1, ["sme"]),
    ]  # fmt: skip
    sampled = [of("sme", [number], victim) for number, victim in ((1, 0), (1, 1), (2, 2), (3, 1))]
    assert whom(*sampled, everyone={1: {0, 1}, 2: {2}, 3: {1, 2}}) == [
        ([1, 2], "all", 1, ["sme"]), ([3], [1], 1, ["sme"]),
    ]  # fmt: skip
    assert whom(of("sme", [1], 0), of("sme", [1], 0, 1)) == [([1], [0], 2, ["sme"])]
    assert whom(of("sme", [1], 0, labels=True), of("sme", [1], 0, labels=False)) == [([1], [0], 1, ["sme"])] * 2
    assert whom(of("sme", [1], 0, labels=True), of("dlg", [1], 0, model=True)) == [([1], [0], 1, ["dlg", "sme"])]
    assert whom(of("lmra", [1, 2], 0), of("lmra", [1, 2, 3], 0)) == [
        ([1, 2], [0], 1, ["lmra"]), ([1, 2, 3], [0], 1, ["lmra"]),
    ]  # fmt: skip
    assert whom(of("lmra", [1], 0), of("lmra", [2], 0)) == [([1], [0], 1, ["lmra"]), ([2], [0], 1, ["lmra"])]
    assert whom(of("nobody:Knows", [1], 0), of("nobody:Knows", [2], 0)) == [
        ([1], [0], 1, ["nobody:Knows"]), ([2], [0], 1, ["nobody:Knows"]),
    ]  # fmt: skip


def test_a_run_that_nothing_attacked_is_made_again_without_an_attack(tmp_path):
    tables = {name: table for name, table in TABLES.items() if name not in ("adversary", "attack")}
    run = fedsim.run(tables, out=tmp_path / "one")
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert tomllib.loads(downloads(page)["experiment.toml"])["adversary"]["when"] == "never"
    again, _ = made_anew(page, tmp_path / "files")
    assert Transcript(again).hash() == Transcript(run.path).hash()


@pytest.mark.thorough
def test_a_page_names_no_folder_of_the_machine_and_says_where_files_belong(tmp_path):
    plain = fedsim.run(
        {name: table for name, table in TABLES.items() if name not in ("adversary", "attack")}
        | {"states": {"rounds": [1]}},
        out=tmp_path / "plain",
    )
    start = tmp_path / "start.safetensors"
    start.write_bytes(next((plain.path / "states").glob("*1.safetensors")).read_bytes())
    tables = TABLES | {"model": TABLES["model"] | {"start": str(start)}}
    run = fedsim.run(tables, out=tmp_path / "one")
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert str(Path.home()) not in page
    [experiment] = downloads(page).values()
    assert str(tmp_path) not in experiment
    assert tomllib.loads(experiment)["model"]["start"] == "start.safetensors"
    digest = hash_file(start)
    assert f"model.start is start.safetensors: put it into the folder of the file. Its SHA-256 is {digest}" in page

    files = tmp_path / "files"
    files.mkdir()
    (files / "start.safetensors").write_bytes(start.read_bytes())
    again, _ = made_anew(page, files)
    assert Transcript(again).hash() == Transcript(run.path).hash()
    assert claims(again) == claims(run.path)


@pytest.fixture
def elsewhere(tmp_path):
    """A recording of somebody's app: that of a run, without what says that fedsim made it."""
    run = fedsim.run({n: t for n, t in TABLES.items() if n not in ("adversary", "attack")}, out=tmp_path / "app")
    path = tmp_path / "recording"
    (run.path / "transcript").rename(path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), "
        "nn.Linear(8, 10))\n"
    )
    return path


def test_a_recording_made_elsewhere_is_attacked_again_in_the_same_way(tmp_path, elsewhere, monkeypatch):
    first = Transcript(elsewhere).recorded_update(1, 0).before
    renamed = list(first)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert len(renamed) == len(names)
    held = {"data": torch.rand(3, 1, 8, 8), "labels": torch.arange(3)}
    (tmp_path / "truth").mkdir()
    save_file(held, tmp_path / "truth/client-0.safetensors")
    (tmp_path / "mine.toml").write_text(
        f"""
app = {{ names = {names}, defended = true }}
truth = {{ 0 = "{tmp_path}/truth/client-0.safetensors" }}
[adversary]
victims = [0]
workers = 1
[adversary.knowledge]
model = "net:build"
input_shape = [1, 8, 8]
num_classes = 10
value_range = [0.0, 1.0]
labels = true
[[attack]]
name = "inverting-gradients"
iterations = 3
"""
    )
    assert not pipeline.attack(OpenRun(elsewhere), read_adversary(OpenRun(elsewhere), tmp_path / "mine.toml")).failures
    before = {path.name: path for path in elsewhere.glob("findings/*/*.safetensors")}
    page = (elsewhere / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    [(name, text)] = downloads(page).items()
    assert f"fedsim attack RUN {name}" in page
    assert "truth.0 is client-0.safetensors: put it into the folder of the file" in page
    assert "net:build is code that does not come with fedsim: put net.py into the folder of the file" in page
    assert tomllib.loads(text)["attack"][0]["tv_weight"] > 0  # a default, written out

    again = tmp_path / "again"
    shutil.copytree(elsewhere, again, ignore=lambda folder, names: [n for n in names if not n.startswith("round-")])
    shutil.copy(tmp_path / "truth/client-0.safetensors", tmp_path)
    (tmp_path / name).write_text(text)
    assert not pipeline.attack(OpenRun(again), read_adversary(OpenRun(again), tmp_path / name)).failures
    after = {path.name: path for path in again.glob("findings/*/*.safetensors")}
    assert before.keys() == after.keys()
    [one] = before
    assert read_facts(before[one])["fingerprint"] == read_facts(after[one])["fingerprint"]
    other = (again / "report.html").read_text(encoding="utf-8")
    assert read_definition(other, "SHA-256 of all findings") == read_definition(page, "SHA-256 of all findings")

    pipeline.report(OpenRun(elsewhere))  # without the attack file, from the findings alone
    alone = (elsewhere / "report.html").read_text(encoding="utf-8")
    [(_, told_alone)] = downloads(alone).items()
    mine = tomllib.loads(text)
    assert tomllib.loads(told_alone)["app"] == mine["app"]
    assert tomllib.loads(told_alone)["attack"] == mine["attack"]
    granted = tomllib.loads(told_alone)["adversary"]["knowledge"]
    assert granted == {
        "model": "net:build", "input_shape": [1, 8, 8], "value_range": [0.0, 1.0], "labels": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", [n for n in registry.registered_names("attacks") if registry.is_builtin("attacks", n)])
def test_settings_that_are_written_out_build_the_same_attack(name):
    [(_, built)] = build_attacks(AttackFile.model_validate({"attack": [{"name": name}]}))
    about = {"title": "its title", "plugin": name, "granted": [], "settings": settings_of(built)}
    [(table, again)] = build_attacks(validate_tables(AttackFile, {"attack": [attack_table(about)]}, "test"))
    assert repr(again) == repr(built)
    assert table.title == "its title"


def test_each_absolute_path_is_left_with_its_last_part_and_nothing_else_changes():
    assert strip_folders("csv (path /home/me/data/x.csv, target y)") == "csv (path x.csv, target y)"
    assert strip_folders("~/runs/a.toml: cannot be read; '/b/c' too") == "a.toml: cannot be read; 'c' too"
    for text in ("https://arxiv.org/abs/2306.00127", "1 / 2", "and/or", "runs/again", "data:image/png;base64,a/b/c+/d"):
        assert strip_folders(text) == text


def test_a_stranger_s_paper_has_an_entry_of_no_particular_kind():
    entry = bibtex(Paper(title="A Title", authors="One, de Two", venue="NeurIPS", year=2020))
    assert entry.startswith("@misc{one2020title,")
    assert "  howpublished = {NeurIPS}," in entry
    assert "  author = {One and {de Two}}," in entry


def test_what_a_run_used_is_cited_once(tmp_path):
    tables = TABLES | {
        "measure": [{"name": "lavp", "steps": 2}, {"name": "spectrum", "exact": 0, "probes": 1, "steps": 2}],
        "defense": [{"name": "gradient-prune"}],
        "partition": TABLES["partition"] | {"samples_per_client": 2},
        "federation": TABLES["federation"] | {"clients": 2, "rounds": 1},
        "training": {"local_steps": 1, "batch_size": 2, "learning_rate": 0.1},
        "adversary": {"victims": [0], "workers": 1, "knowledge": {"labels": True}},
        "attack": [{"name": "sme", "iterations": 1}],
    }
    run = fedsim.run(tables, out=tmp_path / "run")
    page = (run.path / "report.html").read_text(encoding="utf-8")
    entries = downloads(page, "application/x-bibtex")["papers.bib"]
    keys = re.findall(r"^@\w+\{(\w+),$", entries, re.MULTILINE)
    assert len(keys) == len(set(keys))
    used = ("datasets", "digits"), ("measures", "lavp"), ("defenses", "gradient-prune"), ("attacks", "sme")
    for paper in (FLOWER, *(registry.load(group, name).paper for group, name in used)):
        assert find_entry(paper) in entries
    assert "For lavp, spectrum." in page
    assert "For the data set digits." in page
