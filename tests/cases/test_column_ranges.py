"""Each column of a table has a range of its own, for attacks, scores and reports; so has each channel of a series."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedsim
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Dataset, Examples
from fedsim.data.arrays import ArrayFile

SCALES = np.array([1.0, 1e3, 1e5, 0.01])
CLIENTS = 6


def write_leaf_table(folder: Path, outlier: float | None = None) -> Path:
    """Twenty rows of each of six users; columns differ in scale, and one number may be far from all others."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (CLIENTS, 20))
    rows = (rng.normal(size=(CLIENTS, 20, 4)) + labels[..., None]) * (SCALES if outlier is None else 1)
    if outlier is not None:
        rows[-1, 0, 0] = outlier
    users = [f"user {number}" for number in range(CLIENTS)]
    for part, chosen in (("train", slice(0, 14)), ("test", slice(14, 20))):
        held = {
            user: {"x": x[chosen].tolist(), "y": y[chosen].tolist()}
            for user, x, y in zip(users, rows, labels, strict=True)
        }
        place = folder / "data" / part
        place.mkdir(parents=True)
        file = {"users": users, "num_samples": [len(held[user]["y"]) for user in users], "user_data": held}
        (place / "all.json").write_text(json.dumps(file))
    return folder


def scores_of(run: fedsim.Run, metric: str) -> pd.DataFrame:
    return run.scores.query(f"metric == '{metric}'").set_index("victim")


def federate(table: Path, folder: Path, *attacks: dict[str, object]) -> fedsim.Run:
    experiment = {
        "data": {"name": "leaf", "path": str(table)},
        "partition": {"name": "natural"},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"batch_size": 2, "local_steps": 1},
        "strategy": {"name": "fedsgd", "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": CLIENTS, "rounds": 1},
        "adversary": {"victims": [0]},
        "attack": list(attacks),
    }
    return fedsim.run(experiment, out=folder)


@pytest.mark.thorough
def test_columns_of_other_scales_are_recovered_as_well_as_those_of_one(tmp_path: Path) -> None:
    run = federate(
        write_leaf_table(tmp_path / "table"), tmp_path / "run", {"name": "tableak", "iterations": 400, "restarts": 3}
    )
    assert scores_of(run, "columns_right")["value"].item() >= 0.9


def test_one_outlier_does_not_make_a_guess_exact(tmp_path: Path) -> None:
    run = federate(write_leaf_table(tmp_path / "table", outlier=1e6), tmp_path / "run", {"name": "analytic"})
    assert (scores_of(run, "exact")["floor"] < 0.2).all()


def test_recordings_made_elsewhere_may_have_a_range_for_each_column(tmp_path: Path) -> None:
    rows = torch.rand(8, 4) * torch.tensor(SCALES).float()
    low, high = [0.0] * 4, SCALES.tolist()
    table = fedsim.write_truth(tmp_path, lambda client: (rows, torch.zeros(8).long()), [0], value_range=(low, high))
    held = Truth.load(Path(table["0"])).data
    assert torch.allclose(held * torch.tensor(high), rows)
    assert held.amax() > 0.5
    with pytest.raises(DataError, match="give the range of what the model is fed with"):
        fedsim.write_truth(tmp_path, lambda client: (rows, torch.zeros(8).long()), [0], value_range=(low, [1.0] * 4))


def test_a_range_of_too_few_columns_is_refused(tmp_path: Path) -> None:
    run = federate(write_leaf_table(tmp_path / "table"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"value_range: it has 3 values, and an input of shape \[4\] has 4"):
        run.attack("analytic", victim=0, knowledge={"value_range": [[0.0] * 3, [1.0] * 3]})


def test_a_table_without_test_rows_has_ranges_too() -> None:
    rows, none = torch.tensor([[-2.0, 5.0], [4.0, 5.0]]), torch.empty(0, 2)
    parts = {
        name: Examples(raw=raw, labels=torch.zeros(len(raw)).long(), scale=1.0)
        for name, raw in (("train", rows), ("test", none))
    }
    table = Dataset(name="table", num_classes=2, source="here", licence="free", value_range=(-9.0, 9.0), **parts)
    assert [end.tolist() for end in table.input_bounds] == [[-2.0, 5.0], [4.0, 6.0]]
    assert torch.equal(table.from_unit_range(table.to_unit_range(rows)), rows)


def test_ranges_are_measured_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that large mapped files need no memory; and of one channel, which has no other unit, not at all."""
    monkeypatch.setattr("fedsim.data._ROWS_AT_ONCE", 3)
    series = torch.arange(60.0).reshape(10, 2, 3) * torch.tensor([1.0, 100.0])[:, None]

    def build(channels: int) -> Dataset:
        parts = [
            Examples(raw=part[:, :channels], labels=torch.arange(5) % 2, scale=1.0) for part in series.flip(0).split(5)
        ]
        ends = {"value_range": (-9.0, 5900.0), "source": "here", "licence": "free"}
        return Dataset(name="series", num_classes=2, train=parts[0], test=parts[1], modality="series", **ends)

    assert [end.flatten().tolist() for end in build(2).input_bounds] == [[0.0, 300.0], [56.0, 5900.0]]
    assert [end.tolist() for end in build(1).input_bounds] == [-9.0, 5900.0]


def test_channels_of_series_in_other_units_count_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    series = rng.random((200, 2, 12)) * np.array([1.0, 300.0])[:, None]  # an acceleration and a temperature, say
    np.savez(tmp_path / "mine.npz", x=series, y=np.arange(200) % 2)
    dataset = ArrayFile(path="mine.npz").load(tmp_path)
    unit = dataset.to_unit_range(dataset.train.inputs())
    assert unit.std((0, 2)).tolist() == pytest.approx([0.29, 0.29], abs=0.02)
    assert torch.allclose(dataset.from_unit_range(unit), dataset.train.inputs(), atol=1e-3)
    experiment = {
        "data": {"name": "npz", "path": str(tmp_path / "mine.npz")},
        "partition": {"name": "iid", "samples_per_client": 2},
        "model": {"name": "mlp", "hidden": [200]},
        "training": {"local_steps": 1, "batch_size": 2},
        "federation": {"engine": "serial", "clients": 3, "rounds": 1},
        "adversary": {"victims": [0]},
        "attack": [{"name": "spear-ica"}],
    }
    run = fedsim.run(experiment, out=tmp_path / "run")
    assert scores_of(run, "exact")["value"].item() == 1
    assert 0.05 < scores_of(run, "mse")["floor"].item() < 0.15  # of a guess: it would be half of that for one channel
