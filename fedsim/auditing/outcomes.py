"""Progress of jobs, the warnings of attacks, and the sentence for a job that failed."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from fedsim.auditing.plan import Job
from fedsim.errors import AttackCrash, FedsimError, one_line, what_it_said
from fedsim.progress import tell

_LOGGER = logging.getLogger("fedsim.adversaries")


def counted(results: Iterable[tuple[Job, Any]], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """Pass `results` on, and report for each attack how many of its jobs are done."""
    totals, done = Counter(job.title for job in jobs), Counter[str]()
    for title, total in totals.items():
        tell(title, 0, total)
    for job, result in results:
        yield job, result
        done[job.title] += 1
        tell(job.title, done[job.title], totals[job.title])


class Turns:
    """Of jobs that may be under way at the same time: what is overheard of each, and how long it takes.

    As a context manager it listens to the warnings of attacks.
    """

    def __init__(self) -> None:
        self.under_way: list[Turn] = []
        self.now: Turn | None = None
        self._last = 0.0
        self._listener = _Listener(self._hear)

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self._listener)
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.removeHandler(self._listener)

    def divide(self) -> None:
        """Divide the time since the last call among the jobs under way."""
        now = time.monotonic()
        for turn in self.under_way:
            turn.seconds += (now - self._last) / len(self.under_way)
        self._last = now

    def _hear(self, sentence: str) -> None:
        if self.now is not None and sentence not in self.now.warnings:
            self.now.warnings.append(sentence)


class Turn:
    """One of these jobs.

    Attributes:
        warnings: heard while it had its turn, each sentence once; the report shows them beside the finding.
        seconds: that it took; time in which several jobs are under way is divided among them.
    """

    def __init__(self, turns: Turns) -> None:
        self.warnings: list[str] = []
        self.seconds = 0.0
        self._turns = turns

    @contextmanager
    def taken(self) -> Iterator[None]:
        """It has its turn; it is under way from the first one on."""
        if self not in self._turns.under_way:
            self._turns.divide()
            self._turns.under_way.append(self)
        self._turns.now = self
        try:
            yield
        finally:
            self._turns.now = None

    def end(self) -> None:
        """It is no longer under way."""
        if self in self._turns.under_way:
            self._turns.divide()
            self._turns.under_way.remove(self)


class _Listener(logging.Handler):
    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._hear(record.getMessage())


def sentence(job: Job, error: BaseException) -> str:
    """The sentence for `job`, which failed with `error`."""
    where = f"round {job.round}, client {job.victim}: "
    if isinstance(error, FedsimError) and not isinstance(error, AttackCrash):
        told = re.search(rf"client {job.victim}\b", str(error))
        return f"{job.title}, {'' if told else where}{error}"
    what = str(error).splitlines()[0] if isinstance(error, AttackCrash) else one_line(what_it_said(error))
    return f"{job.title}, {where}{what}"
