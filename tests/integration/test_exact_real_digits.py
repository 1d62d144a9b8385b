"""Exact recovery of a client whose columns include likely sums, on real digits."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim
from tests.support.data_folder import find_data_folder


@pytest.mark.thorough
def test_every_digit_of_a_batch_that_is_easily_taken_for_sums_is_certified(tmp_path: Path) -> None:
    """Columns that are certified before their search ends include sums, which hide the last digit."""
    find_data_folder("MNIST/raw", "QMNIST/raw")
    experiment = {
        "data": {"name": "mnist", "standardise": True},
        "partition": {"name": "natural", "samples_per_client": 64, "test_fraction": 0.0, "min_examples": 60},
        "model": {"name": "mlp", "hidden": [400, 400]},
        "training": {"local_epochs": 10, "batch_size": 8, "learning_rate": 0.01},
        "federation": {"engine": "serial", "clients": 10, "rounds": 1, "seed": 1},
    }
    run = fedsim.run(experiment, out=tmp_path / "run")
    finding = run.attack("spear-ica", victim=2)
    assert finding.certified.all()
