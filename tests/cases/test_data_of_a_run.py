"""A run is tied to its data: whatever uses it later finds the same, or says so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import fedsim
from fedsim.base.errors import DataError
from tests.support.commands import call_fedsim


def write_table(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [f"{draw.random()},{draw.choice('abc')},{draw.randrange(2)}" for _ in range(80)]
    path.write_text("\n".join(["x,k,y", *rows]) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_table(tmp_path / "table.csv", 1)
    experiment = {
        "data": {"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y"},
        "partition": {"name": "iid", "samples_per_client": 4},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 3, "rounds": 1, "seed": 5},
        "adversary": {"victims": [0]},
        "attack": [{"name": "label-counts"}],
    }
    fedsim.run(experiment, out=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["attack", "report", "expose", "resume"])
def test_other_data_are_refused_by_every_use_of_a_run(
    command: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "expose": ["expose", str(run), "--measure", "gradient-norm", "--overwrite"],
        "resume": ["run", "--resume", str(run)],
    }
    words = {
        "attack": ["attack", str(run), "--set", "attack.label-counts.label=again"],
        "report": ["report", str(run)],
    } | words
    if command != "attack":
        assert call_fedsim(*words[command]).returncode == 0
    write_table(run.parent / "table.csv", 2)
    assert call_fedsim(*words[command]).returncode != 0
    told = capsys.readouterr()
    assert "others than those that the run was made with" in told.err + told.out


def test_python_refuses_them_too(run: Path) -> None:
    write_table(run.parent / "table.csv", 2)
    with pytest.raises(DataError, match="others than those that the run was made with"):
        fedsim.open(run).attack("label-counts", victim=1)
