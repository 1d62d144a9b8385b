"""Record the progress, warnings and time of attack jobs, and say why a job failed."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from fedsim.audit.plan import AttackJob
from fedsim.base.errors import AttackCrash, FedsimError, error_reason, one_line
from fedsim.base.progress import report_progress

_ATTACK_LOG = logging.getLogger("fedsim.adversaries")


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


class JobLogs:
    """Logs of jobs that may be under way at the same time.

    As a context manager it captures the warnings of attacks, and adds each to the log of the job
    that the attack works on.

    Attributes:
        active_logs: of the jobs under way.
        current: the log of the job that the attack works on now; None between jobs.
    """

    def __init__(self) -> None:
        self.active_logs: list[JobLog] = []
        self.current: JobLog | None = None
        self._last_division = 0.0
        self._handler = _WarningHandler(self._add_warning)

    def __enter__(self) -> Self:
        _ATTACK_LOG.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        _ATTACK_LOG.removeHandler(self._handler)

    def divide_time(self) -> None:
        """Divide the time since the last call among the jobs under way."""
        now = time.monotonic()
        for job_log in self.active_logs:
            job_log.seconds += (now - self._last_division) / len(self.active_logs)
        self._last_division = now

    def _add_warning(self, message: str) -> None:
        if self.current is not None and message not in self.current.warnings:
            self.current.warnings.append(message)


class JobLog:
    """Log of one job.

    Attributes:
        warnings: each message once; the report shows them with the finding.
        seconds: that the job took; time in which several jobs are under way is divided among them.
    """

    def __init__(self, turns: JobLogs) -> None:
        self.warnings: list[str] = []
        self.seconds = 0.0
        self._turns = turns

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record warnings for this job; it counts as under way from the first time on."""
        if self not in self._turns.active_logs:
            self._turns.divide_time()
            self._turns.active_logs.append(self)
        self._turns.current = self
        try:
            yield
        finally:
            self._turns.current = None

    def end(self) -> None:
        """Stop the clock of this job."""
        if self in self._turns.active_logs:
            self._turns.divide_time()
            self._turns.active_logs.remove(self)


class _WarningHandler(logging.Handler):
    def __init__(self, add_warning: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._add_warning = add_warning

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._add_warning(record.getMessage())


def describe_failure(job: AttackJob, error: BaseException) -> str:
    """Return the sentence that says which `job` failed, and with which `error`."""
    where = f"round {job.round}, client {job.victim}: "
    if isinstance(error, FedsimError) and not isinstance(error, AttackCrash):
        names_client = re.search(rf"client {job.victim}\b", str(error))
        return f"{job.title}, {'' if names_client else where}{error}"
    is_crash = isinstance(error, AttackCrash)
    reason = str(error).splitlines()[0] if is_crash else one_line(error_reason(error))
    return f"{job.title}, {where}{reason}"
