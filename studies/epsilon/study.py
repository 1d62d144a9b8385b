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
    "dp-sgd, sigma 1": {"name": "dp-sgd", "noise_multiplier": 1.0},
    "dp-sgd, sigma 1, a step a round": {"name": "dp-sgd", "noise_multiplier": 1.0},
    "dp-sgd, sigma 1, a step a round, 10000 canaries": {"name": "dp-sgd", "noise_multiplier": 1.0},
    "dp-sgd, hardly any noise": {"name": "dp-sgd", "noise_multiplier": 0.01},
    "update-noise, sigma 20": {"name": "update-noise", "noise_multiplier": 20.0},
    "update-noise, sigma 5": {"name": "update-noise", "noise_multiplier": 5.0},
    "update-noise, sigma 2": {"name": "update-noise", "noise_multiplier": 2.0},
    "update-noise, Laplace, sigma 20": {"name": "update-noise", "noise": "laplace", "noise_multiplier": 20.0},
    "update-noise, no noise": {"name": "update-noise", "noise_multiplier": 0.0},
}


def measure(defense: str, seed: int) -> Row:
    """Run a federation with canaries and one without."""
    steps = 1 if "a step a round" in defense else 10
    count, hidden = (10_000, 256) if "10000 canaries" in defense else (2000, 64)
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 100},
        "model": {"name": "mlp", "hidden": [hidden]},
        "training": {"local_steps": steps, "batch_size": 10, "learning_rate": 0.1},
        "federation": {
            "engine": "serial",
            "clients": 10,
            "rounds": 100 // steps,
            "seed": seed,
            "evaluate_every": 100 // steps,
        },
        "defense": [DEFENSES[defense]],
        "adversary": {"when": "never"},
    }
    with tempfile.TemporaryDirectory() as folder:
        canaries = {"canaries": {"count": count, "confidence": 0.95}}
        carried = fedsim.run(experiment | canaries, out=Path(folder) / "canaries")
        plain = fedsim.run(experiment, out=Path(folder) / "plain")
        (found,) = carried.epsilons.to_dict("records")
        row = {name: found[name] for name in ("proved", "measured", "right", "guesses")}
        return row | {"accuracy": final_accuracy(carried), "without canaries": final_accuracy(plain)}
