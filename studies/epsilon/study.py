"""Proved and measured epsilon in a small federation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fedsim
from studies.running import Row, final_accuracy

DEFENSES: dict[str, dict[str, Any]] = {
    "dp-sgd, epsilon 1": {"name": "dp-sgd", "epsilon": 1.0},
    "dp-sgd, epsilon 4": {"name": "dp-sgd", "epsilon": 4.0},
    "dp-sgd, epsilon 10": {"name": "dp-sgd", "epsilon": 10.0},
    "dp-sgd, hardly any noise": {"name": "dp-sgd", "noise_multiplier": 0.01},
    "update-noise, sigma 20": {"name": "update-noise", "noise_multiplier": 20.0},
    "update-noise, sigma 5": {"name": "update-noise", "noise_multiplier": 5.0},
    "update-noise, sigma 2": {"name": "update-noise", "noise_multiplier": 2.0},
    "update-noise, Laplace, sigma 20": {"name": "update-noise", "noise": "laplace", "noise_multiplier": 20.0},
    "update-noise, no noise": {"name": "update-noise", "noise_multiplier": 0.0},
}


def measure(defense: str, seed: int) -> Row:
    """Run a federation with canaries and one without."""
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 100},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"local_steps": 10, "batch_size": 10, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 10, "rounds": 10, "seed": seed, "evaluate_every": 10},
        "defense": [DEFENSES[defense]],
        "adversary": {"when": "never"},
    }
    with tempfile.TemporaryDirectory() as folder:
        canaries = {"canaries": {"count": 2000, "confidence": 0.95}}
        carried = fedsim.run(experiment | canaries, out=Path(folder) / "canaries")
        plain = fedsim.run(experiment, out=Path(folder) / "plain")
        (found,) = carried.epsilons.to_dict("records")
        row = {name: found[name] for name in ("proved", "measured", "right", "guesses")}
        return row | {"accuracy": final_accuracy(carried), "without canaries": final_accuracy(plain)}
