"""Victims that a defense leaves exposed, though the mean over all of them is at the guess.

A mean at or below the floor does not say that no victim is exposed: one of twenty may be, while the claims
about the others are worse than a guess.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.audit.evaluation import statistics
from fedsim.interfaces.metric import Metric, describe_metric
from fedsim.report.sweep_groups import Row

_KEPT_SHARE = 0.5
"""Share of what leaks without a defense from which on a victim counts as exposed with it."""
Update = tuple[str, str, str, str]
"""Victim, seed, round, and whether the attack knows the defense."""


@dataclass(frozen=True, kw_only=True)
class UpdateScore:
    """Score of one victim in one round and seed, the mean over random starts.

    Attributes:
        gain: advantage over the floor, towards leakage, and no larger than that of a claim which counts as exact.
    """

    value: float
    floor: float
    gain: float
    examples: float


def find_exposed_victim(metric: str, rows: Iterable[Row], controls: Iterable[Row]) -> str:
    """Name the victim of whom the attack keeps most, if it keeps half or more of what it gets without the defense.

    What chance may give among so many scores does not count, where that is known.

    Args:
        rows: of `sweep.csv`, of one attack on clients with the defense, in both forms.

    Returns:
        The victim, its round and its seed in a few words; empty for none.
    """
    facts = describe_metric(metric)
    if facts.evidence == "few messages":  # a right guess of one message is as good as any
        return ""
    scores, control_scores = _read_scores(facts, metric, rows), _read_scores(facts, metric, controls)
    if not scores or not control_scores:
        return ""
    usual_gain = math.fsum(score.gain for score in control_scores.values()) / len(control_scores)
    exposed = {}
    for update, score in scores.items():
        if score.gain >= _KEPT_SHARE * usual_gain > 0 and _exceeds_chance(facts, score, len(scores)):
            exposed[update] = score
    if not exposed:
        return ""
    victim, seed, number, _ = max(exposed, key=lambda update: exposed[update].gain)
    return f"victim {victim} (round {number}, seed {seed})"


def find_largest_unseen(num_victims: int) -> float:
    """Return the largest share of exposed victims of whom so many attacked ones show none in 5 % of cases.

    >>> round(find_largest_unseen(5), 2), round(find_largest_unseen(20), 2)
    (0.45, 0.14)
    """
    return 1 - float(statistics.SIGNIFICANCE ** (1 / num_victims))


def explain_open_rounds(rows: Sequence[Row], open_rounds: Iterable[int]) -> str:
    """Say that a defense leaves rounds open of which none was attacked; empty where it leaves none, or one was."""
    attacked = set[int]()
    for row in rows:
        attacked.update(parse_rounds(row["round"]))
    missed = sorted(open_rounds)
    if not missed or attacked & set(missed):
        return ""
    return f"it does not act in round {missed[0]}, and no such round was attacked"


def _read_scores(facts: Metric, metric: str, rows: Iterable[Row]) -> dict[Update, UpdateScore]:
    starts: dict[Update, list[Row]] = defaultdict(list)
    for row in rows:
        if row["metric"] == metric and row["value"] and row["floor"]:
            starts[row["victim"], row["seed"], row["round"], row["knows_defenses"]].append(row)
    return {update: _average(facts, several) for update, several in starts.items()}


def _average(facts: Metric, starts: Sequence[Mapping[str, str]]) -> UpdateScore:
    means = {}
    for column in ("value", "floor", "examples"):
        means[column] = math.fsum(float(row[column] or "nan") for row in starts) / len(starts)
    best = min(means["value"], facts.exact_from)
    gain = best - means["floor"] if facts.higher_is_better else means["floor"] - means["value"]
    return UpdateScore(**means, gain=gain)


def _exceeds_chance(facts: Metric, score: UpdateScore, count: int) -> bool:
    """Return whether the best of `count` scores by chance is as good in at most 5 % of cases, where that is known."""
    from scipy.special import bdtrc, ndtr

    tail = facts.chance_tail(score.value, round(score.examples)) if facts.evidence == "candidates" else None
    if tail is not None:
        chance = tail
    elif facts.is_share and score.examples >= 1:
        total = round(score.examples)
        chance = float(bdtrc(math.ceil(score.value * total - 1e-9) - 1, total, score.floor)) if score.value else 1.0
    elif facts.evidence == "candidates" and score.examples > 1:
        deviation, step = facts.chance_spread(round(score.examples))
        chance = float(ndtr(-(score.gain - step / 2) / deviation))
    else:
        return True
    return chance * count <= statistics.SIGNIFICANCE
