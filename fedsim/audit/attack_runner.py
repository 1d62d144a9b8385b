"""Run the planned jobs of an audit, in this process or in several, and save their findings."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsim.audit.evaluation.evaluator import check_claim
from fedsim.audit.finding_metadata import make_finding_metadata, make_finding_spec
from fedsim.audit.isolation import Isolation, attempt_all
from fedsim.audit.job_log import JobClock, JobLog, describe_failure, report_job_counts
from fedsim.audit.plan import AttackJob, ReportJobProgress
from fedsim.audit.targets import PendingJob
from fedsim.base.errors import AttackCrash, AttackError, DataError, FedsimError, name_rounds
from fedsim.base.files import temporary_folder
from fedsim.base.machine import count_cores
from fedsim.base.progress import track
from fedsim.base.workers import run_in_processes
from fedsim.data.cache import cache_folder
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.failed_attacks import FailedAttack
from fedsim.interfaces.attack import FAILURES, OPTIMAL, Attack, Outcome, Progress, VictimTask
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.interfaces.knowledge import Knowledge
from fedsim.plugins.code_hashes import hash_plugin_code
from fedsim.plugins.inline import is_object

if TYPE_CHECKING:
    from fedsim.audit.audit import Audit

log = logging.getLogger(__name__)
_FACTS_OF_VICTIMS = ("records", "candidates", "known_candidates")
"""Facts among whose records are some of the victim's."""
_ROUNDING = 1e-5
"""Largest difference of a copy's values, which came from units of the model, in the units of findings."""


def explain_missing_isolation(attack: Attack) -> str:
    """Return the sentence about an attack whose class no other process can import."""
    return (
        f"its class '{type(attack).__name__}' is in the program itself, so it runs in the same process as the data "
        "and remembers other victims; put it into a module file, and it runs in a process that has neither"
    )


def run_stage(audit: Audit, jobs: Sequence[AttackJob], progress: ReportJobProgress | None) -> list[FailedAttack]:
    """Run jobs of attacks that do not build on one another; return those that failed."""
    failed: list[FailedAttack] = []
    with (
        temporary_folder() as folder,
        closing(_run_jobs(audit, jobs, progress or _ignore_progress, folder)) as results,
    ):
        for job, error in report_job_counts(results, jobs):
            if error is not None:
                failed.append(describe_failure(job, error))
                # A FedsimError needs no traceback: its sentence says it all.
                says_all = isinstance(error, FedsimError) and not isinstance(error, AttackCrash)
                log.error("%s", failed[-1].sentence, exc_info=None if says_all else error)
    return failed


def _run_jobs(
    audit: Audit, jobs: Sequence[AttackJob], progress: ReportJobProgress, folder: Path
) -> Generator[tuple[AttackJob, BaseException | None]]:
    """Run `jobs`, several at once on a CPU.

    Yields:
        Each job with what it raised, or None.
    """
    _find_optima(audit, sorted({job.victim for job in jobs if job.attack.builds_on == OPTIMAL}))
    workers = audit.spec.adversary.workers or min(count_cores(), (len(jobs) + 1) // 2)
    if workers > 1 and audit.granted_knowledge.device.type == "cpu":
        yield from run_in_processes(jobs, workers, _attack_worker, (audit.opener, folder), progress)
        return
    with _isolate(audit, folder) as isolation:
        for title in dict.fromkeys(job.title for job in jobs):
            jobs_of_attack = [job for job in jobs if job.title == title]
            yield from _AttackQueue(audit, jobs_of_attack, progress).run(isolation)


def _find_optima(audit: Audit, clients: Sequence[int]) -> None:
    """Compute the optimal local models of `clients` that are missing, several at once."""
    missing = [client for client in clients if not audit.optimum.is_saved(client)]
    workers = min(audit.spec.adversary.workers or count_cores(), len(missing))
    if workers > 1:
        results = run_in_processes(missing, workers, _optimum_worker, (audit.opener,), _ignore_progress)
        for client, error in track(results, "optimal local models", len(missing)):
            if error is not None:  # the attack that needs it will fail and be reported
                log.warning("client %d: no optimal local model: %s", client, error)


def _isolate(audit: Audit, room: Path) -> Isolation:
    """Return the processes of attacks of other packages, which learn no path to run or truth."""
    hidden = [audit.folder.path, *(audit.base_folder / file for file in audit.spec.truth.values())]
    hidden += filter(None, [find_data_folder()])
    with suppress(DataError):  # there is no cache folder
        hidden.append(cache_folder())
    return Isolation(room, hidden)


@contextmanager
def _attack_worker(open_audit: Callable[[], Audit], folder: Path) -> Iterator[Callable[[AttackJob, Progress], None]]:
    """Give the function with which a worker process attacks."""
    audit = open_audit()
    with _isolate(audit, folder) as isolation:

        def attack(job: AttackJob, progress: Progress) -> None:
            def report(_job: AttackJob, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
                progress(iteration, iterations, values)

            for _, error in _AttackQueue(audit, [job], report).run(isolation):
                if error is not None:
                    raise error

        yield attack


@contextmanager
def _optimum_worker(open_audit: Callable[[], Audit]) -> Iterator[Callable[[int, Progress], None]]:
    """Give the function with which a worker process computes optimal local models."""
    audit = open_audit()

    def compute_optimum(client: int, progress: Progress) -> None:
        audit.optimum(client)

    yield compute_optimum


class _AttackQueue:
    """Jobs of one attack, which asks for them one by one and may work on several at once."""

    def __init__(self, audit: Audit, jobs: Sequence[AttackJob], progress: ReportJobProgress) -> None:
        self._audit = audit
        self._attack = jobs[0].attack
        # An object of the user's own program has no file that another process could import.
        self._in_this_process = is_object(jobs[0].plugin) or hash_plugin_code(type(self._attack)) is None
        self._progress = progress
        self._clock = JobClock()
        self._remaining = deque(jobs)
        self._running: dict[VictimTask, tuple[PendingJob, JobLog]] = {}
        self._ready: deque[tuple[AttackJob, BaseException | None]] = deque()

    def run(self, isolation: Isolation) -> Iterator[tuple[AttackJob, BaseException | None]]:
        """Run the jobs, at once where the attack can, and save each finding when it is there.

        Yields:
            Each job with what it raised, or None.
        """
        attempt = attempt_all if self._in_this_process else isolation.attempt_all
        while self._remaining:
            count = len(self._remaining)
            error: BaseException = AttackError(f"{self._attack.title} gave neither a finding nor a reason")
            try:
                for task, outcome in attempt(self._attack, self._start_jobs()):
                    pending, job_log = self._running.pop(task)
                    job_log.end()
                    yield pending.job, self._save_outcome(pending, outcome, job_log)
                    yield from self._take_ready()
            except FAILURES as raised:
                error = raised
            # Jobs under way fail with this error; those that were not begun are tried again.
            for pending, job_log in self._running.values():
                job_log.end()
                self._ready.append((pending.job, error))
            self._running.clear()
            # An attack that asks for no job at all fails on all of them.
            if len(self._remaining) == count:
                self._ready += [(job, error) for job in self._remaining]
                self._remaining.clear()
            yield from self._take_ready()

    def _start_jobs(self) -> Iterator[VictimTask]:
        """Prepare a job each time the attack asks for one; skip those that are done."""
        while self._remaining:
            job = self._remaining.popleft()
            try:
                pending = self._audit.targets.prepare(job)
            except FAILURES as error:
                self._ready.append((job, error))
                continue
            if pending is None:
                self._ready.append((job, None))
                continue
            job_log = JobLog(self._clock)
            if is_object(job.plugin):  # the report, too, says under which conditions it was found
                where = f"{name_rounds(job.round)}, client {job.victim}"
                job_log.warnings.append(f"{where}: {explain_missing_isolation(self._attack)}")
            task = VictimTask(
                target=pending.target,
                progress=partial(self._progress, job),
                log_context=job_log.record,
            )
            self._running[task] = pending, job_log
            yield task

    def _take_ready(self) -> Iterator[tuple[AttackJob, BaseException | None]]:
        while self._ready:
            yield self._ready.popleft()

    def _save_outcome(self, pending: PendingJob, outcome: Outcome, job_log: JobLog) -> BaseException | None:
        """Save a finding; return what was raised instead of it, or what is wrong with it."""
        if isinstance(outcome, BaseException):
            return outcome
        audit = self._audit
        try:
            spec = make_finding_spec(audit, pending)
            check_claim(outcome, spec)
            check_no_copies(outcome, spec.knowledge, spec.where)
            path = audit.cache.finding_path(pending.job)
            audit.cache.save(outcome, path, make_finding_metadata(audit, pending, job_log))
        except FAILURES as error:
            return error
        return None


def _ignore_progress(job: Any, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    pass


def check_no_copies(finding: Finding, knowledge: Knowledge, where: str) -> None:
    """Raise AttackError where claimed examples are records of the victim that the attack was granted.

    They would count as recovered from the message, which says nothing of them.
    """
    if not isinstance(finding, Reconstruction | Texts):
        return
    claimed = finding.tokens if isinstance(finding, Texts) else finding.data
    for fact in _FACTS_OF_VICTIMS:
        if fact not in knowledge.tables:
            continue
        records = knowledge.tables[fact].inputs.cpu()
        if isinstance(finding, Reconstruction):
            if knowledge.value_range is None:
                continue
            axes = [-1] + [1] * (records.ndim - 2)
            low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
            records = (records - low) / (high - low)
        if records.shape[1:] == claimed.shape[1:] and (count := _count_copies(claimed, records)):
            raise AttackError(
                f"{where}: {count} of {len(claimed)} claimed examples are records that the attack was granted as "
                f"'{fact}', so they were not recovered from the message; claim only what follows from the message"
            )


def _count_copies(claimed: Tensor, records: Tensor) -> int:
    """Return how many of the claimed examples are among the records."""
    rows, record_rows = claimed.flatten(1).double(), records.flatten(1).double()
    nearest = torch.cdist(rows, record_rows).argmin(1)
    return int(((rows - record_rows[nearest]).abs().amax(1) < _ROUNDING).sum())
