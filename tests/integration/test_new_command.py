"""What `fedsim new` writes runs as it is."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.cli.main import main

Call = Callable[..., str]
FEWER = ["--set", "attack.inverting-gradients.iterations=5", "--quiet"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedsim ...` in an empty folder, without a data folder; what it prints, where it ends well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["fedsim", *words])
        with pytest.raises(SystemExit) as end:
            main()
        told = capfd.readouterr()
        assert not end.value.code, told.err + told.out
        return told.out

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
    told = call("run", "my-audit.toml", "--quiet")
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
    ours, victims = "new_command_attack:NewCommandAttack", ["--set", "adversary.victims=[0, 1]"]
    call("run", "new_command_attack.toml", *FEWER, *victims, "--set", f"attack.{ours}.iterations=60")
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
    assert len(found[ours]) == 4
    assert min(sorted(found[ours])[2:]) > max(sorted(found[ours])[:2]) + 2


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
def test_a_measure(call: Call) -> None:
    told = call("new", "measure", "new-command-measure").splitlines()
    assert "try it:  fedsim expose new_command_measure.toml" in told
    assert "failed" not in call("check", "new_command_measure:NewCommandMeasure")
    call("expose", "new_command_measure.toml")
    call("run", "new_command_measure.toml", *FEWER)
    for folder, count in ("exposure-new_command_measure", 6), ("new_command_measure", 6 * 3):
        with Path("runs", folder, "exposure.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == count
        assert all(float(row["value"]) > 0 and not row["failure"] for row in rows)


def test_a_plugin_in_a_file_is_shown(call: Call) -> None:
    call("new", "defense", "new-command-shown")
    told = call("show", "new_command_shown:NewCommandShown")
    assert told.startswith("new_command_shown:NewCommandShown  (defenses, from new_command_shown)")
    assert "promises: no formal guarantee" in told
    assert "share" in told
