"""What a framework is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from frameworks.jobs import JOBS, Job


@dataclass(frozen=True)
class Task:
    """One federation.

    Attributes:
        job: a name in `frameworks.jobs.JOBS`.
        clients: how many there are.
        rounds: how many are run.
        warm_up: how many of them are not measured.
        sampled: clients that train in each round; only fedsim is asked for fewer than all.
        actors: of Ray.
        record: fedsim's curious server records every round, instead of the first alone.
    """

    job: str
    clients: int
    rounds: int
    warm_up: int
    sampled: int
    actors: int
    record: bool

    @property
    def work(self) -> Job:
        """The network and the data."""
        return JOBS[self.job]
