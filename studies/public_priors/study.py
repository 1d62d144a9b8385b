"""Inversions with and without a prior from public images, and the second tables of docs/studies/priors.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.maximum_a_posteriori import MaximumAPosteriori
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.matching import GradientInversion
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.grid import build_grid
from studies.messages import pair_psnr, score_claim
from studies.priors.study import mean_text
from studies.running import RUNS, STUDIES, Row, run_or_resume
from studies.writing import column_values, group_rows, markdown_table, select_rows

VICTIMS = range(10)
FLOOR_EXAMPLES = 1000
METRICS = ("psnr", "ssim", "identified")
_STEPS: dict[str, Any] = {"iterations": 200, "step_size": 0.1, "tv_weight": 0.0, "prior_weight": 1e-4}
ATTACKS: dict[str, GradientInversion] = {
    "ig": InvertingGradients(iterations=200),
    "ig pca": InvertingGradients(prior="pca", **_STEPS),
    "ig gmm": InvertingGradients(prior="gmm", **_STEPS | {"components": 20}),
    "ig denoiser": InvertingGradients(prior="denoiser", **_STEPS),
    "map": MaximumAPosteriori(draws=0),
    "map denoiser": MaximumAPosteriori(draws=0, prior="denoiser"),
    "map, one gradient": MaximumAPosteriori(draws=0, local_training="gradient"),
    "map, simulated": MaximumAPosteriori(draws=0, local_training="simulated"),
}
TITLES = {"ig": "ig: none", "ig pca": "pca", "ig gmm": "gmm", "ig denoiser": "denoiser", "map": "map: pca"}
WITH_PRIOR = ("ig pca", "ig gmm", "ig denoiser", "map", "map denoiser")
Rows = Sequence[Mapping[str, str]]


@cache
def record_case(case: str, epochs: int) -> tuple[Audit, Experiment]:
    """Run the experiment of a case of the study of priors, and return what the adversary has of it."""
    grid = build_grid(read_sweep(STUDIES / "priors" / "sweep.toml"))
    (point,) = [point for point in grid.points if point.labels["case"] == case and not point.is_added]
    tables = grid.tables(point)
    adversary, _ = tables.pop("adversary"), tables.pop("attack")
    tables["training"] = {**tables["training"], "local_epochs": epochs}
    folder = RUNS / "public_priors" / f"{case}, E = {epochs}"
    run = run_or_resume(tables, folder)
    spec = validate_tables(AttackFile, {"adversary": adversary, "attack": [{"name": "map"}]}, case)
    return open_audit(run.path, spec), Experiment(load_config(run.path / "experiment.toml"))


@cache
def floor_cache(case: str, epochs: int) -> MeasurementCache:
    """Return the measurements of guesses that attacks on a case share."""
    return MeasurementCache()


def measure(case: str, epochs: int, attack: str) -> list[Row]:
    """Attack all victims of a case, and return a row for each victim and metric.

    `other` is the gain in dB by the images of the next victim.
    """
    audit, experiment = record_case(case, epochs)
    data, knowledge = experiment.data, audit.granted_knowledge
    method = ATTACKS[attack].adaptive_copy(attack)
    truths, claims, rows = {}, {}, list[Row]()
    for victim in VICTIMS:
        inputs, labels = data.train(victim)
        truths[victim] = Truth(data=experiment.dataset.to_unit_range(inputs), labels=labels)
        granted = knowledge
        if audit.spec.adversary.knowledge.labels is True:
            granted = replace(knowledge, labels=labels.sort().values)
        rng = generator("public_priors", victim)
        target = Target(transcript=audit.transcript, victim=victim, knowledge=granted, rng=rng)
        claim = method.run(target)
        assert isinstance(claim, Reconstruction)
        claims[victim] = claim
    for victim, claim in claims.items():
        scores = score_claim(
            claim, truths[victim], generator("floor", victim), experiment.dataset.test, FLOOR_EXAMPLES,
            labels_granted=True, cache=floor_cache(case, epochs),
        )  # fmt: skip
        other = pair_psnr(claim.data, truths[(victim + 1) % len(truths)].data) - scores["psnr"].floor
        for metric in METRICS:
            score = scores[metric]
            rows.append(
                {"victim": victim, "metric": metric, "value": score.value, "floor": score.floor, "other": other}
            )
    return rows


def tables(rows: Rows) -> dict[str, str]:
    """Return a table of priors, and one of the model of local training."""
    priors = []
    for (case,), of_case in group_rows(select_rows(rows, epochs=1), "case").items():
        line = [case]
        for attack in [*TITLES, "map denoiser"]:
            of_attack = select_rows(of_case, attack=attack)
            gains = gains_in_db(of_attack)
            line.append(
                f"{mean_text(gains)}, {sum(gains > 0)}, {identified_share(of_attack):.0f} %" if len(gains) else "–"
            )
        # Show the highest of the controls.
        others = [mean_other(rows) for (name,), rows in group_rows(of_case, "attack").items() if name in WITH_PRIOR]
        priors.append([*line, f"{max(others):+.1f}"])
    head = ["defense", *TITLES.values(), "map: denoiser", "other client's images"]
    training = []
    for (case, epochs), of_case in group_rows(rows, "case", "epochs").items():
        before, after = (select_rows(of_case, attack=attack) for attack in ("map, one gradient", "map, simulated"))
        if before and after:
            line = [f"{case}, E = {epochs}"]
            for of_attack in (before, after):
                line += [mean_text(gains_in_db(of_attack)), identified_text(of_attack)]
            training.append(line)
    training_head = ["clients", "one gradient", "identified", "simulated", "identified"]
    return {"": markdown_table(head, priors), "training": markdown_table(training_head, training)}


def gains_in_db(rows: Rows) -> np.ndarray:
    """Return by how many dB each victim is above its floor."""
    of_psnr = select_rows(rows, metric="psnr")
    return column_values(of_psnr, "value") - column_values(of_psnr, "floor")


def mean_other(rows: Rows) -> float:
    """Return by how many dB the claims are above the floor, scored against the images of another client."""
    return float(column_values(select_rows(rows, metric="psnr"), "other").mean())


def identified_text(rows: Rows) -> str:
    """Format the share of examples that are identified, with what guesses get."""
    return f"{identified_share(rows):.0f} % ({identified_share(rows, 'floor'):.0f} %)"


def identified_share(rows: Rows, column: str = "value") -> float:
    """Return the share of examples that are identified, or by chance, in per cent."""
    return float(100 * column_values(select_rows(rows, metric="identified"), column).mean())
