"""The rows that the study of priors keeps, and the table of docs/studies/priors.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import fedsim
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.interfaces.findings import Reconstruction
from studies.defenses.study import METRICS, NONE, gain_text, naive_and_adaptive, worth_of
from studies.messages import pair_psnr
from studies.running import STUDIES, Row, read_rows, runs_of_sweep
from studies.writing import column_values, group_rows, markdown_table, select_rows

GRANTED = ", labels granted"
NOISE_ALONE = "noise alone"
T_QUANTILE = 2.26
"""Of nine degrees of freedom, for an interval of 95 % over ten victims."""
Rows = Sequence[Mapping[str, str]]


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each victim, metric and variant; `other` is the gain in dB by the next victim's images."""
    for labels, run in runs_of_sweep(sweep):
        scores = [row for row in run.scores.to_dict("records") if row["metric"] in METRICS]
        floors = {int(row["victim"]): float(row["floor"]) for row in scores if row["metric"] == "psnr"}
        experiment = Experiment(load_config(run.path / "experiment.toml"))
        truths = {}
        for victim in floors:
            truths[victim] = experiment.dataset.to_unit_range(experiment.data.train(victim)[0])
        claims = {}
        for item in run.findings:
            assert isinstance(item.finding, Reconstruction)
            claims[item.attack, item.victim] = item.finding.data
        for row in scores:
            victim = int(row["victim"])
            yield {
                "cell": labels["case"],
                "knows": str(row["attack"]).endswith("adaptive"),
                "attack": row["attack"],
                "victim": victim,
                "metric": row["metric"],
                "value": float(row["value"]),
                "floor": float(row["floor"]),
                "floor_guess": row["floor_guess"],
                "other": other_gain(claims[row["attack"], victim], victim, truths, floors),
            }


def other_gain(claim: Any, victim: int, truths: Mapping[int, Any], floors: Mapping[int, float]) -> float:
    """Return by how many dB a claim is above the floor of the next victim, scored against its images."""
    victims = list(truths)
    other = victims[(victims.index(victim) + 1) % len(victims)]
    return pair_psnr(claim, truths[other]) - floors[other]


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each cell."""
    former = read_rows(STUDIES / "defenses" / "results.csv")
    undefended = select_rows(rows, cell=NONE)
    lines = []
    for (cell,), of_cell in group_rows(rows, "cell").items():
        line = [cell]
        line += [former_gain(select_rows(former, cell=cell), attack) for attack in ("sme", "ig")]
        naive, adaptive = naive_and_adaptive(of_cell, "map", "psnr")
        line += [gain_text(reading) if reading else "–" for reading in (naive, adaptive)]
        gains = gains_of_best(select_rows(of_cell, metric="psnr"))
        line.append(f"{sum(gain > 0 for gain in gains)} of {len(gains)}")
        strongest = "map adaptive" if adaptive else "map"
        line.append(mean_text(column_values(select_rows(of_cell, attack=strongest), "other")))
        lines.append([*line, verdict_text(cell, of_cell, undefended)])
    head = ["defense", "sme", "ig", "map: naive", "map: adaptive", "victims beyond", "other client's images", "defense"]
    return {"": markdown_table(head, lines)}


def verdict_text(cell: str, rows: Rows, undefended: Rows, attack: str = "map") -> str:
    """Return what the defense is worth against an attack, by PSNR, and by SSIM if that differs."""
    if cell == NOISE_ALONE or cell.startswith(NONE):
        return "–"
    verdicts = []
    for metric in METRICS:
        control, _ = naive_and_adaptive(undefended, attack, metric)
        verdicts.append(worth_of(cell, *naive_and_adaptive(rows, attack, metric), control))
    return verdicts[0] if verdicts[0] == verdicts[1] else f"{verdicts[0]}, by SSIM {verdicts[1]}"


def gains_of_best(rows: Rows) -> list[float]:
    """Return the gains of the adaptive attack, or of the naive one where there is no other."""
    adaptive = select_rows(rows, knows=True) or rows
    return [float(row["value"]) - float(row["floor"]) for row in adaptive]


def mean_text(values: np.ndarray) -> str:
    """Format a mean with half the width of its 95 % interval."""
    return f"{values.mean():+z.1f} ± {T_QUANTILE * values.std(ddof=1) / len(values) ** 0.5:.1f}"


def former_gain(rows: Rows, attack: str) -> str:
    """Format what an attack without a prior gets by the study of defenses, adaptive where it was made."""
    naive, adaptive = naive_and_adaptive(rows, attack, "psnr")
    reading = adaptive or naive
    return gain_text(reading) if reading else "–"
