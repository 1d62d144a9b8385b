"""The rows that the study of priors keeps, and the table of docs/studies/priors.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import fedsim
from fedsim.base.metrics import pair_examples, psnr
from fedsim.federation.build import Experiment
from fedsim.federation.reading import load_config
from studies.running import STUDIES, Row, read_rows, runs_of_sweep
from studies.writing import markdown_table

COUNTED = ", labels counted"
Rows = Sequence[Mapping[str, str]]


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield a row for each victim and variant: dB beyond the floor, also for images of the next victim."""
    for labels, run in runs_of_sweep(sweep):
        scores = run.scores[run.scores["metric"] == "psnr"]
        floors = {int(row["victim"]): float(row["floor"]) for row in scores.to_dict("records")}
        experiment = Experiment(load_config(run.path / "experiment.toml"))
        truths = {}
        for victim in floors:
            truths[victim] = experiment.dataset.to_unit_range(experiment.data.train(victim)[0])
        claims = {(item.attack, item.victim): item.finding.data for item in run.findings}
        for row in scores.to_dict("records"):
            victim = int(row["victim"])
            other = (victim + 1) % len(floors)
            claim = claims[row["attack"], victim]
            other_psnr = psnr(pair_examples(claim, truths[other]), truths[other]).mean().item()
            yield {
                "cell": labels["case"],
                "attack": row["attack"],
                "victim": victim,
                "psnr": float(row["value"]),
                "floor": float(row["floor"]),
                "other": other_psnr - floors[other],
            }


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each cell."""
    former = [row for row in read_rows(STUDIES / "defenses" / "results.csv") if row["metric"] == "psnr"]
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        line = [cell]
        for attack in ("sme", "ig"):
            line.append(former_gain(former, cell, attack))
        for attack in ("map", "map adaptive"):
            line.append(gain_text([row for row in rows if row["cell"] == cell and row["attack"] == attack]))
        best = [row for row in rows if row["cell"] == cell and row["attack"].startswith("map")]
        adaptive = [row for row in best if row["attack"] == "map adaptive"] or best
        line.append(f"{sum(gain(row) > 0 for row in adaptive)} of {len(adaptive)}")
        line.append(mean_text([float(row["other"]) for row in adaptive]))
        lines.append(line)
    head = ["defense", "sme", "ig", "map: naive", "map: adaptive", "victims beyond", "other client's images"]
    return {"": markdown_table(head, lines)}


def gain(row: Mapping[str, str], value: str = "psnr") -> float:
    """Return how many dB a score is beyond the floor."""
    return float(row[value]) - float(row["floor"])


def gain_text(rows: Rows) -> str:
    """Format the mean gain with its 95 % interval."""
    return mean_text([gain(row) for row in rows])


def mean_text(values: Sequence[float]) -> str:
    """Format a mean with half the width of its 95 % interval; a dash without values."""
    if not values:
        return "–"
    half_width = 2.26 * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{np.mean(values):+.1f} ± {half_width:.1f}"


def former_gain(rows: Rows, cell: str, attack: str) -> str:
    """Format what an attack without a prior gets by the study of defenses, adaptive where it was made."""
    if COUNTED in cell:
        return "–"
    of_cell = [row for row in rows if row["cell"] == cell and row["attack"] in (attack, f"{attack} adaptive")]
    adaptive = [row for row in of_cell if row["attack"].endswith("adaptive")] or of_cell
    return mean_text([gain(row, "value") for row in adaptive])
