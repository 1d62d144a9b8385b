"""A stronger defense never helps an attack, and more knowledge never hurts it beyond chance."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from fedsim.api.runs import Run
from fedsim.audit.audit import make_audit
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

pytestmark = pytest.mark.slow

FEDERATION: dict[str, Any] = {
    "partition": {"samples_per_client": 4},
    "model": {"hidden": [64]},
    "training": {"batch_size": 4},
    "federation": {"clients": 8, "rounds": 1},
}
LADDERS: dict[str, list[dict[str, Any]]] = {
    "update-noise": [{"clip": 1.0, "noise_multiplier": noise} for noise in (1e-4, 1e-3, 1e-2, 0.1, 1.0)],
    "quantise": [{"bits": bits} for bits in (16, 8, 4, 2)],
    "top-k": [{"fraction": fraction} for fraction in (0.9, 0.5, 0.1, 0.01)],
    "random-mask": [{"masked": masked} for masked in (0.1, 0.5, 0.9, 0.99)],
    "gradient-prune": [{"pruned": pruned} for pruned in (0.1, 0.5, 0.9, 0.99)],
}
"""Settings of a defense, the weakest first."""
ATTACKS: dict[str, dict[str, Any]] = {
    "inverting-gradients": {"iterations": 150, "step_size": 0.1},
    "sme": {"iterations": 150, "step_size": 0.1},
}
"""Attacks that find something under any defense."""
CHANCE = 0.001
"""Probability that chance alone fails a comparison."""


def measure_psnr(folder: Path, name: str, settings: dict[str, Any], **tables: Any) -> list[float]:
    """Return the PSNR of all victims of an attack, by client."""
    knowledge = tables.pop("knowledge", {})
    run = run_serial(make_tiny_config(**FEDERATION, **tables), folder)
    audit = make_audit(run, make_attack_file({"name": name, **settings}, victims="all", knowledge=knowledge))
    assert audit.run() == []
    audit.score()
    scores = Run(run.path).scores
    return list(scores[scores.metric == "psnr"].sort_values("victim").value)


def is_lower_beyond_chance(values: list[float], than: list[float]) -> bool:
    """Return whether the means of the same victims fell by more than .5 dB and than by chance."""
    fell = sum(than) / len(than) - sum(values) / len(values)
    return fell > 0.5 and ttest_rel(than, values, alternative="greater").pvalue < CHANCE


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defense", LADDERS)
def test_a_stronger_defense_never_helps_the_attack(tmp_path: Path, defense: str, attack: str) -> None:
    rungs = []
    for number, settings in enumerate(LADDERS[defense]):
        tables = {"defense": [{"name": defense, **settings}]}
        rungs.append(measure_psnr(tmp_path / str(number), attack, ATTACKS[attack], **tables))
    for weaker, stronger in itertools.pairwise(rungs):
        assert not is_lower_beyond_chance(weaker, stronger), rungs


@pytest.mark.parametrize("fact", ["labels", "num_classes", "input_mean", "input_std"])
@pytest.mark.parametrize("attack", ["inverting-gradients", "sme", "dlfa"])
def test_a_granted_fact_never_hurts_the_attack(tmp_path: Path, attack: str, fact: str) -> None:
    settings = {"iterations": 150}
    without = measure_psnr(tmp_path / "without", attack, settings, knowledge={fact: False})
    with_fact = measure_psnr(tmp_path / "with", attack, settings, knowledge={fact: True})
    assert not is_lower_beyond_chance(with_fact, without), (with_fact, without)
