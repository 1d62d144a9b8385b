"""What `fedsim new` writes runs as it is."""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import call_fedsim

Call = Callable[..., str]
FEWER = ["--set", "attack.inverting-gradients.iterations=5", "--quiet"]
SMALLER = ["--set", "model.hidden=[8]", "--set", "partition.samples_per_client=2", "--set", "federation.rounds=1"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedsim ...` in an empty folder, without a data folder; what it prints, where it ends well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str) -> str:
        done = call_fedsim(*words, capfd=capfd)
        assert not done.returncode, done.stderr + done.stdout
        return done.stdout

    return run


def scores(run: str) -> dict[str, list[float]]:
    """The PSNR of each attack."""
    found: dict[str, list[float]] = {}
    with Path("runs", run, "scores.csv").open() as file:
        for row in csv.DictReader(file):
            if row["metric"] == "psnr":
                found.setdefault(row["attack"], []).append(float(row["value"]))
    return found


def test_an_experiment(call: Call) -> None:
    assert call("new", "experiment", "my-audit") == "written: my-audit.toml\ntry it:  fedsim run my-audit.toml\n"
    told = call("run", "my-audit.toml", *SMALLER, *FEWER)
    assert "leaks" in told
    assert len(scores("my-audit")["inverting-gradients"]) == 6


def test_an_attack(call: Call) -> None:
    """It is told how to be tried, keeps to the contract, and gets closer with more iterations."""
    told = call("new", "attack", "new-command-attack").splitlines()
    assert told == [
        "written: new_command_attack.py, new_command_attack.toml",
        "try it:  fedsim check new_command_attack:NewCommandAttack",
        "try it:  fedsim run new_command_attack.toml",
    ]
    assert "failed" not in call("check", "new_command_attack:NewCommandAttack")
    ours, victims = "new_command_attack:NewCommandAttack", ["--set", "adversary.victims=[0]"]
    call("run", "new_command_attack.toml", *FEWER, *victims, "--set", f"attack.{ours}.iterations=40")
    call(
        "attack",
        "runs/new_command_attack",
        "new_command_attack.toml",
        *FEWER,
        *victims,
        "--set",
        f"attack.{ours}.iterations=1",
        "--trust",
    )
    found = scores("new_command_attack")
    assert len(found[ours]) == 2
    assert max(found[ours]) > min(found[ours]) + 2


def test_an_inversion(call: Call) -> None:
    """Composed of an update model, a distance and a prior of its own, which keep to the contract as they are."""
    told = call("new", "attack", "new-command-inversion", "--inversion")
    assert "try it:  fedsim check new_command_inversion:NewCommandInversion" in told
    code = Path("new_command_inversion.py").read_text()
    for part in ("Update(inversion.UpdateModel)", "Distance(inversion.Distance)", "Prior(inversion.Prior)"):
        assert f"class NewCommandInversion{part}" in code
    assert "failed" not in call("check", "new_command_inversion:NewCommandInversion")


def test_a_metric(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a package, because no experiment names it, and keeps to the contract as it is."""
    assert call("new", "metric", "new-command-metric").splitlines() == [
        "written: new_command_metric/new_command_metric.py, new_command_metric/pyproject.toml, new_command_metric.toml",
        "first:   pip install --no-deps -e ./new_command_metric",
        "try it:  fedsim check new_command_metric",
        "try it:  fedsim run new_command_metric.toml",
    ]
    monkeypatch.syspath_prepend(Path("new_command_metric").resolve())
    told = call("check", "new_command_metric:NewCommandMetric")
    assert "failed" not in told
    assert "not checked" not in told


@pytest.mark.slow
def test_a_defense(call: Call) -> None:
    """What is recorded is not what is recorded without it."""
    assert "fedsim check new_command_defense:NewCommandDefense" in call("new", "defense", "new-command-defense")
    assert "failed" not in call("check", "new_command_defense:NewCommandDefense")
    call("run", "new_command_defense.toml", *FEWER)
    call("run", "new_command_defense.toml", *FEWER, "--set", "defense=[]", "--out", "runs/without")
    hashes = {call("inspect", f"runs/{run}", "--hash") for run in ("new_command_defense", "without")}
    assert len(hashes) == 2
    assert "new_command_defense:NewCommandDefense" in Path("runs/new_command_defense/report.html").read_text()


@pytest.mark.slow
def test_an_algorithm(call: Call) -> None:
    call("new", "algorithm", "new-command-algorithm")
    assert "failed" not in call("check", "new_command_algorithm:NewCommandAlgorithm")
    call("run", "new_command_algorithm.toml", *FEWER)
    assert "NewCommandAlgorithm" in Path("runs/new_command_algorithm/experiment.toml").read_text()


def test_a_measure(call: Call) -> None:
    told = call("new", "measure", "new-command-measure").splitlines()
    assert "try it:  fedsim expose new_command_measure.toml" in told
    assert "failed" not in call("check", "new_command_measure:NewCommandMeasure")
    two_clients = [*SMALLER, "--set", "federation.clients=2", "--set", "adversary.victims=[0]"]
    call("expose", "new_command_measure.toml", *two_clients)
    call("run", "new_command_measure.toml", *two_clients, "--set", "adversary.when=never")
    for folder in "exposure-new_command_measure", "new_command_measure":
        with Path("runs", folder, "exposure.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2
        assert all(float(row["value"]) > 0 and not row["failure"] for row in rows)


def test_a_panel(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a package, since no experiment names a panel; its class keeps to the contract and shows something."""
    told = call("new", "panel", "new-command-panel").splitlines()
    assert told == [
        "written: new_command_panel/new_command_panel.py, new_command_panel/pyproject.toml, new_command_panel.toml",
        "first:   pip install --no-deps -e ./new_command_panel",
        "try it:  fedsim check new_command_panel",
        "try it:  fedsim run new_command_panel.toml",
    ]
    project = tomllib.loads(Path("new_command_panel/pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"fedsim.panels": {"new_command_panel": "new_command_panel:NewCommandPanel"}}
    monkeypatch.chdir("new_command_panel")
    checked = call("check", "new_command_panel:NewCommandPanel")
    assert "failed" not in checked
    assert "passed          It escapes what names and texts of a run say" in checked


def test_a_plugin_in_a_file_is_shown(call: Call) -> None:
    call("new", "defense", "new-command-shown")
    told = call("show", "new_command_shown:NewCommandShown")
    assert told.startswith("new_command_shown:NewCommandShown  (defenses, from new_command_shown)")
    assert "promises: no formal guarantee" in told
    assert "share" in told
