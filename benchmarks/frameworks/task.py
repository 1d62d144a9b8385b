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
        loop: fedsim's clients train one after the other, small networks too.
        skewed: fedsim's clients have a Dirichlet share of the data (alpha 1), some more and some less.
        record: fedsim's curious server records every round, instead of the first alone.
    """

    job: str
    clients: int
    rounds: int
    warm_up: int
    sampled: int
    actors: int
    record: bool
    loop: bool = False
    skewed: bool = False

    @property
    def work(self) -> Job:
        """The network and the data."""
        return JOBS[self.job]
