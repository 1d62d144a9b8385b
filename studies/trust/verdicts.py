"""What the attacks of the study say of a defense: their readings by metric, and the verdict that follows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.report.adaptive import FAILS, HOLDS, NOT_CONCLUDED, ONLY_NAIVE
from fedsim.report.verdicts import LEAKS, ScoreReading, score_readings
from studies.defenses.study import OF_ALL_SCORES, SHORT, naive_and_adaptive, worth_of
from studies.running import STUDIES, read_rows
from studies.writing import group_rows, select_rows

METRICS = ("psnr", "ssim", "identified")
ATTACKS: dict[str, dict[str, Any]] = {
    "map": {"name": "map", "draws": 0},
    "learned": {"name": "learned-inversion", "simulated": 3000, "features": 800},
    "ig": {"name": "inverting-gradients", "iterations": 200, "step_size": 0.1, "tv_weight": 0.001},
}
WITH_PUBLIC_IMAGES = ("map", "learned")
"""Attacks that try to get past a defense; `ig` does under noise what it does without knowing it."""
NONE = "none"
NAMES = {"psnr": "PSNR", "ssim": "SSIM", "identified": "`identified`"}
Rows = Sequence[Mapping[str, str]]


def readings(rows: Rows, attack: str) -> dict[tuple[str, bool], ScoreReading]:
    """Return what a report would read of an attack, by metric and by whether it knows the defense; seeds are pooled."""
    full: list[dict[str, Any]] = []
    for row in select_rows(rows, attack=attack, failed=""):
        knows = row["knows"] == "True"
        full.append({
            **row, **OF_ALL_SCORES, "examples": row["examples"], "victim": f"{row['seed']}-{row['victim']}",
            "attack": f"{attack} adaptive" if knows else attack, "granted": "defenses" if knows else "",
        })  # fmt: skip
    return {(item.summary.metric, item.summary.knows_defenses): item for item in score_readings(full, {})}


def worths(rows: Rows, undefended: Rows) -> dict[tuple[str, str], str]:
    """Return what a defense is worth by attack and metric, with the attacks of the study of defenses."""
    case, found = rows[0]["case"], {}
    for attack in ATTACKS:
        judged, controls = readings(rows, attack), readings(undefended, attack)
        for metric in METRICS:
            naive, adaptive = judged.get((metric, False)), judged.get((metric, True))
            if naive is not None and naive.verdict == LEAKS:
                found[attack, metric] = SHORT[FAILS]
            elif naive is not None:
                found[attack, metric] = worth_of(case, naive, adaptive, controls.get((metric, False)))
    former = read_rows(STUDIES / "defenses" / "results.csv")
    for attack, metric in itertools.product(("sme", "ig"), ("psnr", "ssim")):
        pair = naive_and_adaptive(select_rows(former, cell=case), attack, metric)
        found[f"{attack} of the other study", metric] = worth_of(case, *pair, None)
    return found


def verdict_of(rows: Rows, undefended: Rows) -> str:
    """Return the worst that any attack says of a defense by any metric, and by which metrics it leaks.

    It holds where it does against all attacks with public images that could be made, and no other one leaks. As long
    as an attack was not tried, nothing holds.
    """
    if rows[0]["case"] == NONE:
        return "–"
    found = worths(rows, undefended)
    leaking = {metric for (_, metric), worth in found.items() if worth in (SHORT[FAILS], SHORT[ONLY_NAIVE])}
    if identifies_transformed(rows[0]["case"]):
        return "fails by `identified` in any transform"
    if leaking:
        names = [name for metric, name in NAMES.items() if metric in leaking]
        return "fails" if len(names) == len(NAMES) else f"fails by {' and '.join(names)}"
    tried = {row["attack"] for row in rows}
    here = {worth for (attack, _), worth in found.items() if attack in WITH_PUBLIC_IMAGES}
    return SHORT[HOLDS] if tried.issuperset(ATTACKS) and here == {SHORT[HOLDS]} else SHORT[NOT_CONCLUDED]


def identifies_transformed(case: str) -> bool:
    """Return whether more images are identified in any transform than by chance, by the study of transforms."""
    rows = select_rows(read_rows(STUDIES / "transforms" / "results.csv"), case=case)
    for of_public in group_rows(rows, "public").values():
        gains = {(row["victim"], row["seed"]): float(row["turned"]) - float(row["chance"]) for row in of_public}
        mean, margin = mean_and_margin(gains)
        if mean > margin:
            return True
    return False
