"""A stranger's modality with a data set of it: found by name, checked, scored and drawn without an edit of the core."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim.federation.run_folder import read_rows
from tests.support.packages import run_fedsim, write_package

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-data-and-models.md"
ENTRIES = {"modalities": {"pairs": "Pairs"}, "datasets": {"measurements": "Measurements"}}
FILE = """
[data]
name = "measurements"

[partition]
name = "iid"
samples_per_client = 3

[model]
name = "mlp"
hidden = [64]

[training]
local_epochs = 1
batch_size = 3

[federation]
clients = 2
rounds = 1

[adversary]
victims = [0, 1]
workers = 1

[[attack]]
name = "analytic"
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, beside an installed package."""
    block = re.search(r"^`my_modality.py`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    write_package(tmp_path / "site", "my_modality", block[1], ENTRIES)
    (tmp_path / "one.toml").write_text(FILE)
    return tmp_path


@pytest.mark.slow
def test_it_is_found_checked_scored_and_drawn(work: Path) -> None:
    listed = run_fedsim(work, "list", "modalities")
    assert "pairs   Pairs of measurements of one thing.  [my_modality]" in listed.stdout
    for name in ("pairs", "measurements"):
        checked = run_fedsim(work, "check", name)
        assert checked.returncode == 0, checked.stdout
    done = run_fedsim(work, "run", "one.toml")
    assert done.returncode == 0, done.stderr
    rows = read_rows(work / "runs" / "one" / "scores.csv")
    # Metrics of any numbers are scored, those of images and series are not.
    assert {row["metric"] for row in rows} == {"mse", "exact", "l_sim", "l_sim_line", "identified", "label_accuracy"}
    assert all(float(row["value"]) < float(row["floor"]) for row in rows if row["metric"] == "mse")
    page = (work / "runs" / "one" / "report.html").read_text()
    assert page.count('aria-label="claimed pair 1 and the true pair"') == 2
    assert "member × feature" in page


@pytest.mark.parametrize("modality", ["series", None])
def test_series_of_a_program_are_attacked_and_shown_as_lines(modality: str | None, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    raw = torch.rand(40, 2, 12, generator=rng)
    labels = torch.arange(40) % 4
    keywords = {} if modality is None else {"modality": modality}
    data = fedsim.Dataset(
        name="mine", num_classes=4, source="drawn", licence="none", **keywords,
        train=fedsim.Examples(raw=raw[:32], labels=labels[:32], scale=1.0),
        test=fedsim.Examples(raw=raw[32:], labels=labels[32:], scale=1.0),
    )  # fmt: skip
    run = fedsim.run(
        {
            "data": data,
            "partition": {"name": "iid", "samples_per_client": 2},
            "model": {"name": "mlp", "hidden": [64]},
            "training": {"local_epochs": 1, "batch_size": 2},
            "federation": {"clients": 1, "rounds": 1},
            "adversary": {"victims": [0], "workers": 1},
            "attack": [{"name": "analytic"}],
        },
        out=tmp_path / "run",
    )
    rows = {row["metric"]: row for row in read_rows(tmp_path / "run" / "scores.csv")}
    assert {"mse", "correlation", "smape", "exact"} <= rows.keys()
    assert float(rows["correlation"]["value"]) > 0.9 > float(rows["correlation"]["floor"])
    run.report()
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('aria-label="claimed series') == 2
    assert "channel × time" in page


@pytest.mark.parametrize("attack", ["inverting-gradients", pytest.param("sme", marks=pytest.mark.thorough)])
def test_matching_finds_series_behind_a_network_of_convolutions(attack: str, tmp_path: Path) -> None:
    fedsim.run(
        {
            "data": {"name": "waves", "length": 16, "clients": 1, "examples_per_client": 4},
            "partition": {"name": "natural", "samples_per_client": 1},
            "model": {"name": "cnn-1d", "channels": [16]},
            "training": {"local_epochs": 1, "batch_size": 1},
            "federation": {"clients": 1, "rounds": 1},
            "adversary": {"victims": [0], "workers": 1, "knowledge": {"labels": True}},
            "attack": [{"name": attack, "iterations": 120}],
        },
        out=tmp_path / "run",
    )
    rows = {row["metric"]: row for row in read_rows(tmp_path / "run" / "scores.csv")}
    for metric, is_beyond in (("mse", float.__lt__), ("smape", float.__lt__), ("correlation", float.__gt__)):
        assert is_beyond(float(rows[metric]["value"]), float(rows[metric]["floor"])), metric
    assert float(rows["correlation"]["value"]) > 0.9


def test_an_array_file_of_images_that_claims_to_be_series_is_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).random((20, 1, 8, 8)), y=np.arange(20) % 2)
    table = {"name": "npz", "path": str(tmp_path / "mine.npz"), "modality": "series"}
    with pytest.raises(
        fedsim.FedsimError, match=r"'npz' has inputs of shape \(example, 1, 8, 8\), but its modality 'series'"
    ):
        fedsim.run({"data": table}, out=tmp_path / "run")
