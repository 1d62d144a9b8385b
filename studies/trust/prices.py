"""Which defenses leave the fewest images identified for what they cost in accuracy, by the rows of the study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.audit.evaluation.statistics import confidence_interval, mean_and_margin
from studies.running import STUDIES, read_rows
from studies.trust.verdicts import ATTACKS, NONE, Rows, verdict_of
from studies.writing import group_rows, markdown_table, select_rows

UNPROTECTED_ROUNDS = {"censor": "censor round 11"}
"""Cases of the same federation in a round that the defense does not protect; what it leaves is the worse of both."""


@dataclass(frozen=True, kw_only=True)
class Identification:
    """What an attack identifies of the images of all victims and seeds, as shares in per cent.

    Attributes:
        attack: its label, and whether it knows the defense.
        margin: half of the 95 % interval.
        chance: what as many matches identify by chance.
    """

    attack: str
    share: float
    margin: float
    chance: float

    @classmethod
    def from_rows(cls, attack: str, rows: Rows, value: str = "value", chance: str = "floor") -> Identification:
        """Return the means of these columns."""
        shares = {(row["victim"], row["seed"]): 100 * float(row[value]) for row in rows}
        share, margin = mean_and_margin(shares)
        by_chance = float(np.mean([100 * float(row[chance]) for row in rows]))
        return cls(attack=attack, share=share, margin=margin, chance=by_chance)


def table_of_prices(rows: Rows) -> str:
    """Return the table of the defenses that leave fewer images identified than all that cost less accuracy.

    A defense against which an attack was not tried has no line, as this attack may identify more.
    """
    found = {case: of_case for (case,), of_case in group_rows(rows, "case").items()}
    priced = []
    for case, of_case in found.items():
        if {row["attack"] for row in of_case}.issuperset(ATTACKS):
            priced.append((cost_of(of_case, found[NONE]), strongest_identification(found, case), case))
    priced.sort(key=lambda item: (item[2] != NONE, round(item[0][0], 6), item[1].share))
    lines, fewest = [], math.inf
    for (cost, margin), worst, case in priced:
        if worst.share < fewest:
            fewest = worst.share
            price = "–" if case == NONE else f"{cost:.1f} ± {margin:.1f}"
            line = [case, price, f"{worst.share:.1f} ± {worst.margin:.1f}", f"{worst.chance:.1f}", worst.attack]
            lines.append([*line, verdict_of(found[case], found[NONE])])
    head = ["defense", "points of accuracy that it costs", "images identified, %", "by chance, %", "strongest attack"]
    return markdown_table([*head, "verdict"], lines)


def cost_of(rows: Rows, undefended: Rows) -> tuple[float, float]:
    """Return how many points of accuracy a defense costs, seed by seed, and half of the 95 % interval over seeds."""
    without, with_defense = accuracies(undefended), accuracies(rows)
    lost = np.array([100 * (without[seed] - value) for seed, value in with_defense.items()])
    low, high = confidence_interval(lost)
    return float(lost.mean()), (high - low) / 2


def accuracies(rows: Rows) -> dict[str, float]:
    """Return the accuracy of the federation of each seed."""
    return {row["seed"]: float(row["accuracy"]) for row in rows}


def strongest_identification(found: Mapping[str, Rows], case: str) -> Identification:
    """Return what the attack identifies that identifies most, in any transform and in rounds without protection."""
    rows = [*found[case], *found.get(UNPROTECTED_ROUNDS.get(case, ""), ())]
    every = []
    for (attack, knows, _), of_cell in group_rows(
        select_rows(rows, metric=IDENTIFIED), "attack", "knows", "case"
    ).items():
        every.append(Identification.from_rows(attack + (", adaptive" if knows == "True" else ""), of_cell))
    transformed = select_rows(read_rows(STUDIES / "transforms" / "results.csv"), case=case)
    for (public,), of_cell in group_rows(transformed, "public").items():
        every.append(Identification.from_rows(f"map, public images {public}", of_cell, "turned", "chance"))
    return max(every, key=lambda item: item.share)
