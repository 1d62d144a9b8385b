"""Cells of a sweep without results, as what they are: an attack that a defense stopped, or one that is lacking."""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import itemgetter

from fedsim.base.grouping import group_by
from fedsim.report.setting_names import SettingNames
from fedsim.report.summary import enumerate_words
from fedsim.report.sweep_groups import Row
from fedsim.report.sweep_lead import ONLY_SETTING


def describe_failed_cells(rows: Sequence[Row], cells: Sequence[Row], axes: Sequence[str]) -> list[str]:
    """Say of which cells there are no results, or not all.

    An attack that is made without a defense, and fails with it, may have met the defense at work: why it failed is
    quoted. Where no attack was made, as where all clients failed and no federation came about, nothing was met.
    """
    asked = [row for row in cells if row["state"] != "does not apply"]
    names = SettingNames.from_labels(axes, [tuple(row[axis] for axis in axes) for row in asked])
    scored = {row["cell"] for row in rows if row["value"]}
    sentences, others = [], list[Row]()
    for attack, of_attack in group_by(asked, itemgetter("attack")).items():
        lacking = [row for row in of_attack if row["state"] != "done"]
        stopped = [row for row in lacking if _is_stopped(row, scored)]
        others += [row for row in lacking if row not in stopped]
        if stopped:
            settings = dict.fromkeys(names(tuple(row[axis] for axis in axes)) or ONLY_SETTING for row in stopped)
            sentences.append(
                f"Under {enumerate_words(list(settings))} {attack} failed in {len(stopped)} of {len(of_attack)} cells, "
                f"and without a defense it did not, which says nothing of other attacks; the first reason: "
                f"{stopped[0]['reason'].partition('; ')[0].rstrip('.')}."
            )
    if others:
        sentences.append(_describe_others(others, asked, scored))
    return sentences


def _is_stopped(row: Row, scored: Set[str]) -> bool:
    """Return whether an attack was made in a cell and failed on all victims, and not on all of its control."""
    was_made = row["state"] == "failed" and bool(row["run"])
    return was_made and row["cell"] not in scored and row["control"] in scored


def _describe_others(cells: Sequence[Row], asked: Sequence[Row], scored: Set[str]) -> str:
    """Say which attacks lack results in how many cells, and why."""
    states = []
    for row in cells:
        states.append("failed in part" if row["state"] == "failed" and row["cell"] in scored else row["state"])
    by_attack = group_by(asked, itemgetter("attack"))
    counts = []
    for attack, lacking in group_by(cells, itemgetter("attack")).items():
        counts.append(f"{attack} in {len(lacking)} of {len(by_attack[attack])}")
    why = enumerate_words(list(dict.fromkeys(states)))
    return f"Results of some cells are missing ({why}): {enumerate_words(counts)}."
