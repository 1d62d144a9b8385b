"""Attacks that failed on a victim: `failed.csv` keeps each until the same attack succeeds there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from fedsim.base.errors import name_rounds
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, read_rows


@dataclass(frozen=True, kw_only=True)
class FailedAttack:
    """Attack that failed on one victim.

    Attributes:
        attack: its title.
        round: the attacked round; `1-3+7` or `1-5 by 2` for an attack on several.
        victim: the client.
        repeat: which of several random starts, from 0.
        why: the error.
    """

    attack: str
    round: str
    victim: int
    repeat: int
    why: str

    @property
    def job(self) -> tuple[str, str, int, int]:
        """Return what was attempted, apart from its outcome."""
        return self.attack, self.round, self.victim, self.repeat

    @property
    def sentence(self) -> str:
        """Return the sentence that says what failed and why."""
        names_client = re.search(rf"client {self.victim}\b", self.why)
        where = "" if names_client else f"{name_rounds(self.round)}, client {self.victim}: "
        return f"{self.attack}, {where}{self.why}"


_COLUMNS = tuple(field.name for field in fields(FailedAttack))


def read_failed_attacks(folder: RunFolder) -> list[FailedAttack]:
    """Read `failed.csv`; none where every attack succeeded."""
    failed_attacks = []
    for row in read_rows(folder.failures, _COLUMNS, counts=("victim", "repeat")):
        attempt = FailedAttack(
            attack=row["attack"],
            round=row["round"],
            victim=int(row["victim"]),
            repeat=int(row["repeat"]),
            why=row["why"],
        )
        failed_attacks.append(attempt)
    return failed_attacks


def save_failed_attacks(
    folder: OpenRun, failed: Iterable[FailedAttack], succeeded: Iterable[tuple[str, str, int, int]]
) -> None:
    """Note attacks that failed, and strike out those that failed before and now succeeded.

    Args:
        succeeded: what was attempted with success, see `FailedAttack.job`.
    """
    before: Mapping[tuple[str, str, int, int], FailedAttack]
    before = {attempt.job: attempt for attempt in read_failed_attacks(folder)}
    now = {**before, **{attempt.job: attempt for attempt in failed}}
    for job in succeeded:
        now.pop(job, None)
    if now != before:
        folder.write_table(folder.failures, _COLUMNS, [vars(attempt) for attempt in now.values()])
