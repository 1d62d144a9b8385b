"""The pages of a sweep and of a comparison in a browser."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.report.sweep_page import write_sweep_page
from fedsim.sweeps.table import write_cells, write_table

AXES = ("defense", "training.local_epochs")
RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_steps": 1, "batch_size": 3, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 2, "rounds": 2},
    "adversary": {"victims": "all", "workers": 1, "knowledge": {"labels": True}},
    "attack": [{"name": "inverting-gradients", "iterations": 2}],
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The page of a grid with an adaptive attack, a cell that failed, and one that does not apply."""
    rows = [
        {
            "cell": f"{defense}-{epochs}-{seed}", "federation": "f", "control": f"none-{epochs}-{seed}",
            "defense": defense, "baseline": 0, "examples": 4.0, "floor_guess": "noise", "guess": 0.1,
            "num_evaluated": 500,
            "training.local_epochs": epochs, "seed": seed, "attack": "sme", "knows_defenses": knows, "victim": victim,
            "round": "1", "repeat": 0, "metric": metric, "value": value + seed + 2 * victim + knows, "floor": 10.0,
            "ceiling": "", "better": "higher", "accuracy": 0.9 - place / 10, "proved_epsilon": "",
            "measured_epsilon": "", "bytes": 100.0, "seconds": 1.0, "run": f"../cells/{defense}",
        }
        for (place, (defense, value)), epochs, seed, knows, victim, metric in product(
            enumerate({"none": 20.0, "noise": 14.0, "top-k": 18.0}.items()), ("1", "5"), (1, 2), (0, 1), (0, 1),
            ("psnr", "ssim"),
        )
    ]  # fmt: skip
    where = {"defense": "noise", "training.local_epochs": "1", "seed": 3, "attack": "dager"}
    write_table(tmp_path, AXES, rows)
    states = [("does not apply", "it reads tokens"), ("failed", "it broke"), ("done", "")]
    write_cells(tmp_path, AXES, [where | {"state": state, "reason": reason} for state, reason in states])
    (tmp_path / "sweep.toml").write_text("[sweep]\nseeds = [1, 2]\n")
    return write_sweep_page(tmp_path)


def test_the_page_of_a_sweep_is_for_everybody(sweep, is_for_everybody):
    is_for_everybody(sweep)


def test_on_paper_the_further_metrics_are_shown(sweep, look):
    page = look(sweep).page
    folded = page.locator(".metric:not([open]) .heat table").last
    assert not folded.evaluate("one => one.checkVisibility()")
    page.emulate_media(media="print")
    assert folded.evaluate("one => one.checkVisibility()")


def test_the_page_of_a_comparison_is_for_everybody(browser, tmp_path, is_for_everybody):
    fedsim.run(RUN, out=tmp_path / "plain")
    fedsim.run(RUN | {"defense": [{"name": "top-k", "fraction": 0.2}]}, out=tmp_path / "top-k")
    comparison = fedsim.compare(tmp_path / "plain", tmp_path / "top-k")
    is_for_everybody(comparison.report(tmp_path / "comparison.html").path)
