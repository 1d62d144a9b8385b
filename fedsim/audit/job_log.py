"""Record the progress, warnings and time of attack jobs, and say why a job failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedsim.audit.plan import AttackJob
from fedsim.base.errors import AttackCrash, FedsimError, error_reason, one_line
from fedsim.base.progress import report_progress
from fedsim.federation.failed_attacks import FailedAttack
from fedsim.interfaces.attack_warnings import collect_warnings


def report_job_counts(
    results: Iterable[tuple[AttackJob, Any]], jobs: Sequence[AttackJob]
) -> Iterator[tuple[AttackJob, Any]]:
    """Pass `results` on, and report for each attack how many of its jobs are done."""
    totals, done = Counter(job.title for job in jobs), Counter[str]()
    for title, total in totals.items():
        report_progress(title, 0, total)
    for job, result in results:
        yield job, result
        done[job.title] += 1
        report_progress(job.title, done[job.title], totals[job.title])


class JobClock:
    """Clock of jobs that may be under way at the same time, among which it divides the time."""

    def __init__(self) -> None:
        self._running: list[JobLog] = []
        self._last_division = 0.0

    def start(self, job_log: JobLog) -> None:
        """Count a job as under way, unless it is already."""
        if job_log not in self._running:
            self._divide_time()
            self._running.append(job_log)

    def stop(self, job_log: JobLog) -> None:
        """Count a job as under way no longer."""
        if job_log in self._running:
            self._divide_time()
            self._running.remove(job_log)

    def _divide_time(self) -> None:
        """Divide the time since the last call among the jobs under way."""
        now = time.monotonic()
        for job_log in self._running:
            job_log.seconds += (now - self._last_division) / len(self._running)
        self._last_division = now


class JobLog:
    """Log of one job.

    Attributes:
        warnings: each message once; the report shows them with the finding.
        seconds: that the job took; time in which several jobs are under way is divided among them.
    """

    def __init__(self, clock: JobClock) -> None:
        self.warnings: list[str] = []
        self.seconds = 0.0
        self._clock = clock

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record warnings for this job; it counts as under way from the first time on."""
        self._clock.start(self)
        with collect_warnings(self._add_warning):
            yield

    def end(self) -> None:
        """Stop the clock of this job."""
        self._clock.stop(self)

    def _add_warning(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def describe_failure(job: AttackJob, error: BaseException) -> FailedAttack:
    """Return which `job` failed, and with which `error`."""
    reason = str(error)
    if isinstance(error, AttackCrash):  # what follows the first line is a traceback
        reason = reason.splitlines()[0]
    elif not isinstance(error, FedsimError):
        reason = one_line(error_reason(error))
    return FailedAttack(attack=job.title, round=job.round, victim=job.victim, repeat=job.repeat, why=reason)
