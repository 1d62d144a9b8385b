"""Set the scores of a run beside the ceilings that its defenses prove."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.audit.evaluation.evaluator import group_members
from fedsim.audit.evaluation.proved_ceilings import (
    ProvedCeiling,
    compute_ceiling,
    compute_chance,
    find_trade_off,
)
from fedsim.federation.run_folder import RunFolder, read_ledger
from fedsim.privacy.ceilings import TradeOff
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.report.attack_traits import read_metadata

Curves = dict[tuple[tuple[int, ...], int, str], TradeOff | str]
"""Trade-off curve by clients, last round and attacker, or why there is none."""
_FINDING_KEYS = ("attack", "variant", "victim", "round")
"""Columns that a score has in common with its finding. Of one attack and victim there may be several: by
others than the server, or of other rounds, in which the group of the victim was another."""


def compute_score_ceilings(
    folder: RunFolder, scores: Sequence[Mapping[str, Any]], partition: str
) -> list[ProvedCeiling]:
    """Return each score that has a value beside its ceiling; none where nothing is proved."""
    ledger = read_ledger(folder)
    if not ledger:
        return []
    abouts = {_finding_key(about): about for about in read_metadata(folder)}
    curves: Curves = {}
    ceilings = []
    for row in scores:
        about = abouts.get(_finding_key(row))
        if about is None or math.isnan(float(row["value"] or "nan")):
            continue
        ceilings.append(_compute_score_ceiling(row, about, partition, ledger, curves))
    tests = sum(not math.isnan(item.ceiling) for item in ceilings)
    return [replace(item, tests=max(1, tests)) for item in ceilings]


def _finding_key(about: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(about[key]) for key in _FINDING_KEYS)


def _compute_score_ceiling(
    row: Mapping[str, Any],
    about: Mapping[str, Any],
    partition: str,
    ledger: Sequence[Mapping[str, Any]],
    curves: Curves,
) -> ProvedCeiling:
    """Return one score beside its ceiling; the curve is computed once for the same clients and round."""
    victim, last_round = str(row["victim"]), parse_rounds(str(row["round"]))[-1]
    attacker = about.get("attacker", "server")
    clients = tuple(group_members(about)) or (int(victim),)
    key = clients, last_round, str(attacker)
    if key not in curves:
        curves[key] = find_trade_off(ledger, clients, last_round, attacker)
    curve = curves[key]
    ceiling, reason = compute_ceiling(row, about.get("knowledge", {}), partition, curve)
    chance = 1.0
    if not reason and isinstance(curve, TradeOff):
        chance = compute_chance(row, ceiling, curve)
    by_whom = "" if attacker == "server" else f" by {AdversaryRole.parse(attacker)}"
    return ProvedCeiling(
        attack=f"{row['attack']}{by_whom}",
        victim=victim,
        round=str(row["round"]),
        metric=str(row["metric"]),
        value=float(row["value"]),
        ceiling=ceiling,
        reason=reason,
        chance=chance,
        curve=curve if isinstance(curve, TradeOff) else None,
    )


def find_highest_rates(ceilings: Sequence[ProvedCeiling], rates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the largest true-positive rate of any membership attack at each false-positive rate.

    The highest curve of all victims and rounds counts; None where one of them has none.
    """
    of_memberships = [item for item in ceilings if item.metric == "membership_auc"]
    curves = []
    for item in of_memberships:
        if item.reason or item.curve is None:
            return None
        curves.append(item.curve.true_positive_rate(rates))
    return np.max(curves, axis=0) if curves else None


def summarise_ceilings(ceilings: Sequence[ProvedCeiling]) -> list[ProvedCeiling]:
    """Return for each attack and metric the score that is nearest to its ceiling, or above it."""
    nearest: dict[tuple[str, str], ProvedCeiling] = {}
    for item in ceilings:
        key = item.attack, item.metric
        if key not in nearest or _rank(item) > _rank(nearest[key]):
            nearest[key] = item
    return list(nearest.values())


def _rank(item: ProvedCeiling) -> tuple[bool, float]:
    return item.is_exceeded, -math.inf if item.reason else item.value - item.ceiling
