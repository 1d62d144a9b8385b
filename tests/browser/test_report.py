"""The report of a run in a browser: who reads it by keyboard, in the dark, on a phone or without a network can."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

import fedsim

RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 4, "test_fraction": 0.25},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_steps": 1, "batch_size": 3, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 3, "rounds": 2},
    "defense": [{"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.001}],
    "measure": [{"name": "gradient-norm"}],
    "adversary": {"victims": "all", "workers": 1, "knowledge": {"labels": True, "defenses": True}},
    "attack": [{"name": "inverting-gradients", "iterations": 4}, {"name": "sme", "iterations": 4}],
}
TABLE = RUN | {
    "defense": [],
    "data": {"name": "leaf-synthetic", "features": 6, "clients": 3},
    "partition": {"name": "natural", "samples_per_client": 4, "test_fraction": 0.25},
    "attack": [{"name": "inverting-gradients", "iterations": 4}],
}


@pytest.fixture(scope="module")
def images(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of attacks on images, naive and adaptive, with what clients measured of themselves."""
    return fedsim.run(RUN, out=tmp_path_factory.mktemp("images") / "run").path / "report.html"


@pytest.fixture(scope="module")
def table(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an attack on records of a table."""
    return fedsim.run(TABLE, out=tmp_path_factory.mktemp("table") / "run").path / "report.html"


def test_the_page_of_attacks_on_images_is_for_everybody(images, is_for_everybody):
    is_for_everybody(images)


def test_the_page_of_an_attack_on_a_table_is_for_everybody(table, is_for_everybody):
    is_for_everybody(table)


def test_without_javascript_the_page_says_the_same(images, look):
    without = look(images, javascript=False).page.inner_text("body")
    for said in ("What leaked", "inverting-gradients", "How to make this page again", "Threat model"):
        assert said in without


def test_a_file_is_saved_as_it_is_shown(images, look):
    page = look(images).page
    with page.expect_download() as saving:
        page.click("a[download='experiment.toml']")
    saved = Path(saving.value.path()).read_text(encoding="utf-8")
    [linked] = re.findall(r'download="experiment.toml" href="data:[^,]*,([^"]*)"', images.read_text(encoding="utf-8"))
    assert saved == b64decode(linked).decode()
    assert saving.value.suggested_filename == "experiment.toml"
