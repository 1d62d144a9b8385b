"""Code that a stranger's run folder names is not loaded, however deep in its settings the name stands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedsim.base.errors import TrustError
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import allow_code, find_references, restrict_code
from tests.support.commands import call_fedsim
from tests.support.experiments import make_tiny_config, run_serial

GATES = {
    "table": '[[defense]]\nname = "gate"\nmeasure = { name = "evil_module:Measure" }\nlimit = 1.0\n',
    "text": '[[defense]]\nname = "gate"\nmeasure = "evil_module:Measure"\nlimit = 1.0\n',
    "deep": '[[defense]]\nname = "update-noise"\nclip = [{ a = [{ b = "evil_module:Measure" }] }]\n',
}
COMMANDS = {
    "report": ["report", "."],
    "attack": ["attack", "."],
    "expose": ["expose", ".", "--measure", "gradient-norm"],
    "resume": ["run", "--resume", "."],
    "geometry": ["geometry", "."],
}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_serial(make_tiny_config(federation={"rounds": 1}), tmp_path_factory.mktemp("stranger") / "run").path
    (folder / "evil_module.py").write_text("from pathlib import Path\nPath('was-run').touch()\nclass Measure: ...\n")
    return folder


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("command", COMMANDS)
def test_nested_code_of_a_run_folder_is_not_run(
    command: str, gate: str, stranger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = stranger / "experiment.toml"
    before = experiment.read_text()
    monkeypatch.chdir(stranger)
    try:
        experiment.write_text(before + GATES[gate])
        assert call_fedsim(*COMMANDS[command]).returncode == 2
    finally:
        experiment.write_text(before)
    assert "'evil_module:Measure' is code that the run folder names" in capsys.readouterr().err
    assert not (stranger / "was-run").exists()


def test_loading_is_refused_where_it_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text("class Thing: ...\nclass Other: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with restrict_code(["--set", "model.name=some_module:Thing"]):
        assert registry.load_object("some_module:Thing").__name__ == "Thing"
        with pytest.raises(TrustError, match=r"^'some_module:Other' is code that neither you nor a file of "):
            registry.load_object("some_module:Other")
        allow_code({"attack": [{"name": "some_module:Other"}]})
        assert registry.load_object("some_module:Other").__name__ == "Other"
    with restrict_code(anything=True):
        registry.load_object("some_module:Other")
    assert "FEDSIM_ALLOWED_CODE" not in os.environ
    registry.load_object("some_module:Other")  # a Python program could import it as well


def test_references_are_found_at_any_depth_and_within_texts() -> None:
    tables = {"a": [1, {"b": ("x", 'settings: { name = "pack.mod:Cls" }')}], "c": "no:: reference", "d": "127.0.0.1:80"}
    assert [reference for _, reference in find_references(tables)] == ["pack.mod:Cls"]


def test_a_run_folder_does_not_choose_whom_to_connect_to(
    stranger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = stranger / "experiment.toml"
    before = experiment.read_text()
    monkeypatch.chdir(stranger)
    try:
        experiment.write_text(before.replace('engine = "serial"', 'engine = "ray"\naddress = "10.0.0.1:6379"'))
        assert call_fedsim("run", "--resume", ".").returncode == 2
    finally:
        experiment.write_text(before)
    assert "federation.address: '10.0.0.1:6379' is a machine that the run folder names" in capsys.readouterr().err
