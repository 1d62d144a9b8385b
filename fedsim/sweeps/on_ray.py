"""Run jobs in Ray actors of one core each, on this machine or on hosts with shared files."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedsim.base.errors import AttackCrash, RunError, first_line
from fedsim.base.worker_messages import ErrorMessage
from fedsim.base.workers import PrepareWork
from fedsim.federation.engines.ray_session import ray_session
from fedsim.sweeps.queue import JobQueue, SweepJob

log = logging.getLogger(__name__)
_MAX_RETRIES = 2
"""Most repetitions of a job whose actor died."""
_ACTOR_TIMEOUT = 600.0
"""Seconds to wait for any actor."""


def run_in_actors(
    queue: JobQueue,
    workers: int | None,
    prepare: PrepareWork,
    arguments: tuple[Any, ...],
    address: str | None,
    shared: Path,
) -> Iterator[tuple[SweepJob, BaseException | None]]:
    """Run the jobs of `queue`; yield each with its error, or None, once it ends.

    `fedsim.base.workers.run_in_processes` does the same without Ray. The job of an actor that dies
    is repeated by another one, at most twice. Jobs only go to actors that have started, so that
    none waits for an actor without a core, because a host died or others use the cluster.

    Args:
        workers: most actors at once; by default as many as there are cores.
        prepare: called once in each actor with `arguments`; entering its result gives the function
            that does a job.
        shared: a file that all hosts have to see; jobs fail on a host that does not.
    """
    with ray_session(address, workers, "sweep"):
        import ray

        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        max_actors = min(cores, workers or cores)
        actor_class: Any = ray.remote(num_cpus=1)(_Actor)
        idle: list[Any] = []
        starting: dict[Any, Any] = {}  # actors by the future of their start
        busy: dict[Any, tuple[Any, SweepJob]] = {}  # actors and jobs by the future of the job
        retries, retry_counts, failed_starts = deque[SweepJob](), Counter[str](), 0
        last_progress = time.monotonic()
        while queue or retries or busy:
            # Give jobs to idle actors, and start another actor where jobs wait.
            while (queue or retries) and idle:
                actor = idle.pop()
                job = retries.popleft() if retries else queue.popleft()
                busy[actor.do.remote(job)] = actor, job
            if (queue or retries) and len(busy) + len(starting) < max_actors:
                actor = actor_class.remote(prepare, arguments, str(shared))
                starting[actor.confirm_start.remote()] = actor
            # Wait for starts and ends.
            completed, _ = ray.wait([*busy, *starting], timeout=0.5)
            if completed or busy:
                last_progress = time.monotonic()
            elif time.monotonic() > last_progress + _ACTOR_TIMEOUT:
                raise RunError(f"sweep.on: Ray has had no core for a single actor for {_ACTOR_TIMEOUT:.0f} s; free one")
            for future in completed:
                if future in starting:
                    actor = starting.pop(future)
                    error = _job_error(future)
                    if error is None:
                        idle.append(actor)
                        failed_starts = 0
                        continue
                    failed_starts += 1
                    if failed_starts > _MAX_RETRIES:  # it is not the fault of a single host
                        raise RunError(f"sweep.on: actors cannot begin: {error}") from error
                    continue
                actor, job = busy.pop(future)
                error = _job_error(future)
                if not isinstance(error, _ActorLost):
                    idle.append(actor)
                elif retry_counts[job.name] < _MAX_RETRIES:
                    retry_counts[job.name] += 1
                    log.warning("%s: %s; it is done again", job.name, error)
                    retries.append(job)
                    continue
                yield job, error


class _ActorLost(AttackCrash):
    """Error of a job whose actor's process died."""


def _job_error(future: Any) -> BaseException | None:
    """Return the error that a job raised; None where it succeeded."""
    import ray

    try:
        message: ErrorMessage | None = ray.get(future)
    except ray.exceptions.RayActorError as error:
        return _ActorLost(f"its Ray actor died ({first_line(error)}); where memory runs out, lower sweep.workers")
    except ray.exceptions.RayTaskError as error:
        return AttackCrash(first_line(error))
    return None if message is None else message.to_error()


class _Actor:
    """Ray actor that does one job after the other."""

    def __init__(self, prepare: PrepareWork, arguments: tuple[Any, ...], shared: str) -> None:
        self._complaint = "" if Path(shared).is_file() else f"does not see {shared}"
        self._stack = ExitStack()
        self._work = self._stack.enter_context(prepare(*arguments))

    def confirm_start(self) -> None:
        """Return once the actor has a process."""

    def do(self, job: SweepJob) -> ErrorMessage | None:
        """Do a job; return the error that it raised."""
        import platform

        if self._complaint:
            error = RunError(
                f"host {platform.node()} {self._complaint}; name a store and an --out that all hosts share"
            )
            return ErrorMessage.from_error(error)
        try:
            self._work(job, lambda iteration, iterations, values: None)
        except BaseException as error:  # sys.exit as well, which must end only this job
            return ErrorMessage.from_error(error)
        return None
