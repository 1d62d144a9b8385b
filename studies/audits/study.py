"""Audits of sound defenses, in which every violation is a false alarm."""

from __future__ import annotations

import random
from dataclasses import replace

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.update_noise import UpdateNoise
from fedsim.interfaces.defense import Defense
from fedsim.privacy.defense_audit import audit_defense
from studies.running import Row

CLIPS = (0.1, 1.0, 5.0)


def make_defense(name: str, multiplier: float, clip: float) -> Defense:
    """Return one of our private defenses; an update's neighbours are twice the clip apart."""
    if name == "dp-sgd":
        return DpSgd(noise_multiplier=multiplier, clip=clip)
    if name == "dp-sgd per layer":
        return DpSgd(noise_multiplier=multiplier, clip=clip, clipping="per-layer")
    defense = UpdateNoise(noise_multiplier=2 * multiplier, clip=clip)
    return replace(defense, noise="laplace") if name == "update-noise, Laplace" else defense


def measure(defense: str, seed: int) -> Row:
    """Audit one defense, whose settings follow from the seed."""
    draws = random.Random(f"{defense} {seed}")
    multiplier, clip = draws.choice((0.7, 1.0, 1.5, 2.0, 4.0)), draws.choice(CLIPS)
    done = audit_defense(make_defense(defense, multiplier, clip), trials=100, seed=seed)
    return {"multiplier": multiplier, "clip": clip, "violations": len(done.violations)}
