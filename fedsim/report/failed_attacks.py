"""Sentences on attacks that failed on a victim, for the report, the index, the summary and the dossier."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.base.errors import name_rounds, number_of
from fedsim.base.grouping import group_by
from fedsim.federation.failed_attacks import FailedAttack

_MAX_NAMED = 10
"""Most clients that a sentence names."""


def name_victims(jobs: Sequence[tuple[str, str, int, int]]) -> str:
    """Return `client 1 (round 2), client 2 (rounds 1-3)`, of many clients their number alone.

    >>> name_victims([("sme", "2", 1, 0), ("sme", "1-3", 2, 0)])
    'client 1 (round 2), client 2 (rounds 1-3)'
    """
    if len(victims := dict.fromkeys(job[2] for job in jobs)) > _MAX_NAMED:
        return number_of(len(victims), "client")
    names = []
    for victim in victims:
        rounds = list(dict.fromkeys(job[1] for job in jobs if job[2] == victim and job[1]))
        word = "round" if len(rounds) == 1 and rounds[0].isdigit() else "rounds"
        listed = f" ({word} {', '.join(rounds)})" if rounds else ""
        names.append(f"client {victim}{listed}")
    return ", ".join(names)


def _shared_reason(attempt: FailedAttack) -> str:
    """Return the error without the round and the client at its beginning, by which each would be a group of its own."""
    return attempt.why.removeprefix(f"{name_rounds(attempt.round)}, client {attempt.victim}: ")


def group_failed_attacks(failed: Sequence[FailedAttack]) -> list[tuple[str, str, str]]:
    """Return for each attack and error the attack, the victims that it failed on, and the error."""
    grouped = []
    for (attack, why), attempts in group_by(failed, lambda attempt: (attempt.attack, _shared_reason(attempt))).items():
        grouped.append((attack, name_victims([attempt.job for attempt in attempts]), why))
    return grouped


def describe_failed_attacks(failed: Sequence[FailedAttack]) -> list[str]:
    """Return a sentence without its full stop for each attack and error."""
    return [f"{attack} failed on {victims}: {why}" for attack, victims, why in group_failed_attacks(failed)]
