"""Pitfalls of comparisons: attacks, controls, seeds, refused cells, and defenses that are none."""

from __future__ import annotations

from typing import Any

from fedsim.base.errors import join_first
from fedsim.federation.config import Config
from fedsim.federation.defense_limits import list_undefended_rounds
from fedsim.federation.experiment import Experiment
from fedsim.pitfalls.defense_probe import find_missing_strength
from fedsim.pitfalls.design import EvaluationDesign, attacked_rounds, recorded_rounds
from fedsim.pitfalls.pitfall import PitfallRule, Symptom
from fedsim.report.summary import enumerate_words

_NUM_SEEDS = 3
"""Seeds of a counter-experiment."""
_MAX_LISTED = 3
"""Most refused cells that are named."""


def _sweep_over_seeds(seed: int) -> dict[str, Any]:
    """Return the table that makes an experiment a sweep, which adds the control of a defense."""
    return {"sweep": {"seeds": [seed + number for number in range(_NUM_SEEDS)]}}


class NoAttack(PitfallRule):
    """A file without an attack."""

    name = "no-attack"
    title = "nothing is attacked"
    reason = "Without an attack, nothing is known about leakage."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return whether no attack is named; a sweep without one is refused."""
        if design.attacked_specs:
            return None
        datasets = [design.dataset(config) for config in design.configs]
        is_of_texts = any(dataset is not None and dataset.task.modality == "text" for dataset in datasets)
        attack = {"name": "tgias-ro-text" if is_of_texts else "inverting-gradients"}
        return Symptom(detail="The file has no [[attack]].", changes={"attack": [attack]})


class RefusedCells(PitfallRule):
    """Cells of a sweep whose settings are refused, so that nobody knows their pitfalls."""

    name = "refused-cells"
    title = "refused cells of a sweep"
    reason = "They are left out of the comparison."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the cells with the reasons."""
        if design.sweep is None or not design.refused:
            return None
        cells: dict[str, str] = {}
        exclusions: list[dict[str, Any]] = []
        for point, error in design.refused:
            cells.setdefault(str(error), point.name)
            if not point.is_added:  # the sweep adds no control to a cell that it leaves out
                exclusions.append(dict(point.labels))
        examples = [f"{name} ({error})" for error, name in cells.items()]
        return Symptom(
            detail=f"{join_first(examples, _MAX_LISTED)}.",
            changes={"sweep": {"exclude": [*design.sweep.sweep.exclude, *exclusions]}},
        )


class NoControl(PitfallRule):
    """A defense without the same attack on clients that have none."""

    name = "no-control"
    title = "no undefended control for a defense"
    reason = "If the attack also fails without the defense, its failure says nothing about the defense."

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


class UndefendedRounds(PitfallRule):
    """A defense of some rounds alone, and no attack on the other ones."""

    name = "undefended-rounds"
    title = "rounds without the defense are not attacked"
    reason = "They may reveal what the defended rounds hide."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the defenses with their first round without them, where no cell attacks such a round of theirs."""
        symptoms: dict[str, tuple[str, dict[str, Any]]] = {}
        judged = set[str]()
        for config, _ in design.attacked_configs:
            attacked = attacked_rounds(config)
            for table, defense in zip(config.defense, Experiment(config).defenses, strict=True):
                undefended = list_undefended_rounds(defense, range(1, config.federation.rounds + 1))
                key = table.model_dump_json()
                if set(undefended) & set(attacked):
                    judged.add(key)
                elif undefended:
                    recorded = sorted({*recorded_rounds(config), undefended[0]})
                    changes = {
                        "recording": {"rounds": recorded, "every": 1},
                        "adversary": {"rounds": sorted({*attacked, undefended[0]})},
                    }
                    symptoms[key] = f"{table.name} does not act in round {undefended[0]}", changes
        missing = [symptom for key, symptom in symptoms.items() if key not in judged]
        if not missing:
            return None
        details = dict.fromkeys(detail for detail, _ in missing)
        return Symptom(
            detail=f"{'; '.join(details)}, and nothing is attacked there.",
            changes=missing[0][1],
            further=[changes for _, changes in missing[1:]],
        )


class NoStrength(PitfallRule):
    """A defense at the strength with which it does nothing."""

    name = "no-strength"
    title = "a defense that hides nothing, such as noise of multiplier 0"
    reason = "Messages within its limits are sent unchanged."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the defenses that do nothing in all cells that have them."""
        details: dict[str, str] = {}
        acting: set[str] = set()
        strengthened: list[tuple[set[str], list[dict[str, Any]]]] = []
        # Give strength to each defense that has none.
        for config in design.configs:
            tables = [table.model_dump(exclude_unset=True) for table in config.defense]
            idle: set[str] = set()
            for table, defense in zip(tables, Experiment(config).defenses, strict=True):
                missing = find_missing_strength(defense)
                if missing is None:
                    acting.add(table["name"])
                    continue
                settings = [f"{setting} = {getattr(defense, setting):g}" for setting in missing]
                details.setdefault(table["name"], f"{table['name']} ({', '.join(settings)})")
                idle.add(table["name"])
                table.update(missing)
            strengthened.append((idle, tables))
        # Name so many cells that each defense has strength in one.
        remaining = set(details) - acting
        changes = []
        for idle, tables in strengthened:
            if idle & remaining:
                changes.append({"defense": tables})
                remaining -= idle
        if not changes:
            return None
        subjects = [detail for name, detail in details.items() if name not in acting]
        verb = "sends" if len(subjects) == 1 else "send"
        return Symptom(
            detail=f"{enumerate_words(subjects)} {verb} small messages on unchanged.",
            changes=changes[0],
            further=changes[1:],
        )
