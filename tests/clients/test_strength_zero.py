"""Each built-in defense at strength zero leaves the recording as it is without it, to the bit, or refuses to be so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedsim.base.errors import ConfigError
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.plugins import registry
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import hash_recording

MORE_ZERO: list[tuple[str, dict[str, Any]]] = [
    ("gate", {"measure": "expected-error", "below": 0.0, "action": "noise", "noise": 1.0}),
    ("gate", {"measure": "gradient-norm", "fraction": 0.0, "action": "drop-examples"}),
]
ZERO: list[tuple[str, dict[str, Any]]] = [
    ("augmentation", {"padding": 0, "flip": 0.0}),
    ("gate", {"measure": "gradient-norm", "above": 1e9}),
    ("gradient-prune", {"pruned": 0.0}),
    ("mixup", {"alpha": 0.0}),
    ("outpost", {"noise_scale": 0.0, "pruned": 0.0}),
    ("outpost", {"noised": 0.0, "pruned": 0.0}),
    ("random-mask", {"masked": 0.0}),
    ("random-mask", {"masked": 0.0, "error_feedback": True}),
    ("soteria", {"pruned": 0.0}),
    ("top-k", {"fraction": 1.0}),
    ("top-k", {"fraction": 1.0, "error_feedback": True}),
    ("update-noise", {"clip": 1e6, "noise_multiplier": 0.0}),
    ("update-noise", {"clip": 1e6, "noise_multiplier": 0.0, "noise": "laplace"}),
    ("update-noise", {"clip": 1e6, "noise_multiplier": 0.0, "quantile": 0.9}),
]
"""A defense, and settings with which it does nothing."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("censor", {"trials": 0}, "trials: expected at least 1, got 0"),
    ("dp-sgd", {"noise_multiplier": 0.0}, "noise_multiplier: expected a value above 0, got 0.0"),
    ("instahide", {"k": 1}, "k: expected at least 2, got 1"),
    ("layer-freeze", {"layers": []}, "layers: nothing is named"),
    ("quantise", {"bits": 32}, "bits: expected at most 16, got 32"),
]
"""A defense that always does something, the settings that would mean that it does not, and how it refuses them."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": {"name": "fedavg"}},
    "fedsgd": {
        "strategy": {"name": "fedsgd", "learning_rate": 0.1},
        "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None},
    },
}


def make_config(strategy: str, *defenses: dict[str, Any]) -> Config:
    """Clients train in loops of their own, as they do beside a defense that acts inside local training."""
    few = {"partition": {"samples_per_client": 16}, "federation": {"clients": 3, "vectorise": False}}
    return make_tiny_config(defense=list(defenses), **few, **STRATEGIES[strategy])


@pytest.fixture(scope="module")
def undefended_hashes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    @cache
    def of(strategy: str) -> dict[str, str]:
        return hash_recording(run_serial(make_config(strategy), tmp_path_factory.mktemp(strategy) / "run"))

    return of


def test_each_defense_is_here() -> None:
    ours = {
        name
        for name in registry.registered_names("defenses")
        if (owner := registry.find_entry_point("defenses", name).dist) and owner.name == "fedsim-curious"
    }
    assert {name for name, _ in ZERO} | {name for name, _, _ in REFUSED} == ours


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("fedsgd", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("name", "settings"), [*ZERO, *(pytest.param(*zero, marks=pytest.mark.thorough) for zero in MORE_ZERO)]
)
def test_strength_zero_leaves_the_recording_as_it_is(
    name: str,
    settings: dict[str, Any],
    strategy: str,
    undefended_hashes: Callable[[str], dict[str, str]],
    tmp_path: Path,
) -> None:
    config = make_config(strategy, {"name": name, **settings})
    found = hash_recording(run_serial(config, tmp_path / "run"))
    assert len(found) == 2
    assert found == undefended_hashes(strategy)


@pytest.mark.parametrize(("name", "settings", "expected"), REFUSED)
def test_a_defense_that_always_does_something_refuses_strength_zero(
    name: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(make_config("fedavg", {"name": name, **settings})).check()
    assert expected in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_little_strength_is_seen(
    strategy: str, undefended_hashes: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    """Else equal recordings would say nothing."""
    noise = {"name": "update-noise", "clip": 1e6, "noise_multiplier": 1e-9}
    found = hash_recording(run_serial(make_config(strategy, noise), tmp_path / "run"))
    assert found.keys() == undefended_hashes(strategy).keys()
    assert not found.items() & undefended_hashes(strategy).items()
