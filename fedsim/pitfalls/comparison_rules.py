"""Pitfalls of comparisons: controls, seeds, and defenses that are none."""

from __future__ import annotations

from typing import Any

from fedsim.federation.build import Experiment
from fedsim.federation.config import Config
from fedsim.pitfalls.defense_probe import find_missing_strength
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.pitfalls.pitfall import PitfallRule, Symptom

_NUM_SEEDS = 3
"""Seeds of a counter-experiment."""


def _sweep_over_seeds(seed: int) -> dict[str, Any]:
    """Return the table that makes an experiment a sweep, which adds the control of a defense."""
    return {"sweep": {"seeds": [seed + number for number in range(_NUM_SEEDS)]}}


class NoControl(PitfallRule):
    """A defense without the same attack on clients that have none."""

    name = "no-control"
    title = "no undefended control beside a defense"
    reason = "Where the attack fails without the defense too, that says nothing of the defense."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the defenses of a single experiment; a sweep adds the control itself."""
        if design.sweep is not None or not design.attacked_specs:
            return None
        [(spec, _)] = design.attacked_specs
        if isinstance(spec, Config):
            if not spec.defense:
                return None
            names = ", ".join(dict.fromkeys(table.name for table in spec.defense))
            return Symptom(
                detail=f"No client is attacked without {names}; `fedsim sweep` adds this control.",
                changes=_sweep_over_seeds(spec.federation.seed),
            )
        if not spec.adversary.knowledge.defenses:
            return None
        return Symptom(
            detail="The clients have defenses; attack a recording of the same clients without them, too.",
            changes={"adversary": {"knowledge": {"defenses": False}}},
        )


class OneSeed(PitfallRule):
    """A result of one seed."""

    name = "one-seed"
    title = "one seed only"
    reason = "A seed is one draw of data, weights and batches, so differences may be chance."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the seed where there is one."""
        if not design.attacked_configs or len(design.seeds) != 1:
            return None
        [seed] = design.seeds
        where = "sweep.seeds" if design.sweep is not None else "a single run; `fedsim sweep` takes several"
        return Symptom(detail=f"Seed {seed} is the only one ({where}).", changes=_sweep_over_seeds(seed))


class NoStrength(PitfallRule):
    """A defense at the strength with which it does nothing."""

    name = "no-strength"
    title = "a defense that hides nothing, such as noise of multiplier 0"
    reason = "Messages within its limits are those of clients without a defense."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the first defense that does nothing in all cells that have it."""
        strengths: dict[str, tuple[str, float, Config, int]] = {}
        acting: set[str] = set()
        for config in design.configs:
            for position, defense in enumerate(Experiment(config).defenses):
                name = config.defense[position].name
                missing = find_missing_strength(defense)
                if missing is None:
                    acting.add(name)
                else:
                    strengths.setdefault(name, (*missing, config, position))
        for name, (setting, value, config, position) in strengths.items():
            if name in acting:
                continue
            tables = [table.model_dump(exclude_unset=True) for table in config.defense]
            now = getattr(Experiment(config).defenses[position], setting)
            tables[position][setting] = value
            return Symptom(
                detail=f"{name} with {setting} = {now} sends small messages on unchanged.", changes={"defense": tables}
            )
        return None
