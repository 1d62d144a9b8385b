"""Jobs side by side in Ray actors of one core each, on this machine or on a cluster whose hosts share a file system."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedsim.auditing.workers import Prepare, describe, raised
from fedsim.engines.ray import joined
from fedsim.errors import AttackCrash, RunError, first_line
from fedsim.sweeps.queue import Job, Queue

log = logging.getLogger(__name__)
_LOSSES = 2
"""How often a job is done again whose actor died."""
_PATIENCE = 600.0
"""Seconds without any actor."""


def in_actors(
    queue: Queue, workers: int | None, prepare: Prepare, arguments: tuple[Any, ...], address: str | None, shared: Path
) -> Iterator[tuple[Job, BaseException | None]]:
    """Work on the jobs of `queue`; yield each, and what it raised, once it is done, as `in_processes` does.

    The job of an actor that dies is done again by another one, twice at most. A job goes to an actor that has begun, so
    that none waits for one that finds no core, because a host died or others use the cluster.

    Args:
        workers: most actors at once; by default as many as there are cores.
        prepare: called once in each actor with `arguments`; what it gives on entering does the work.
        address: a Ray cluster to join.
        shared: a file that a host has to see whose jobs are not to fail.

    Raises:
        InstallationError: Ray is not installed.
        RunError: Ray could not be started or reached, or has no core for a single actor for ten minutes.
    """
    with joined(address, workers, "sweep"):
        import ray

        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
        most = min(cores, workers or cores)
        made: Any = ray.remote(num_cpus=1)(_Actor)
        idle: list[Any] = []
        beginning: dict[Any, Any] = {}  # actors by what they answer once they have begun
        busy: dict[Any, tuple[Any, Job]] = {}
        again, losses, stillborn = deque[Job](), Counter[str](), 0
        moved = time.monotonic()
        while queue or again or busy:
            while (queue or again) and idle:
                actor = idle.pop()
                job = again.popleft() if again else queue.popleft()
                busy[actor.do.remote(job)] = actor, job
            if (queue or again) and len(busy) + len(beginning) < most:
                actor = made.remote(prepare, arguments, str(shared))
                beginning[actor.confirm_start.remote()] = actor
            ended, _ = ray.wait([*busy, *beginning], timeout=0.5)
            if ended or busy:
                moved = time.monotonic()
            elif time.monotonic() > moved + _PATIENCE:
                raise RunError(f"sweep.on: Ray has had no core for a single actor for {_PATIENCE:.0f} s; free one")
            for answer in ended:
                if answer in beginning:
                    actor = beginning.pop(answer)
                    if (error := _outcome(answer)) is None:
                        idle.append(actor)
                        stillborn = 0
                    elif (stillborn := stillborn + 1) > _LOSSES:  # it is not the host
                        raise RunError(f"sweep.on: actors cannot begin: {error}") from error
                    continue
                actor, job = busy.pop(answer)
                error = _outcome(answer)
                if not isinstance(error, _ActorLost):
                    idle.append(actor)
                elif losses[job.name] < _LOSSES:
                    losses[job.name] += 1
                    log.warning("%s: %s; it is done again", job.name, error)
                    again.append(job)
                    continue
                yield job, error


class _ActorLost(AttackCrash):
    """The process of an actor is gone."""


def _outcome(answer: Any) -> BaseException | None:
    """What a job raised; None where it went well."""
    import ray

    try:
        said = ray.get(answer)
    except ray.exceptions.RayActorError as error:
        return _ActorLost(f"its Ray actor died ({first_line(error)}); where memory runs out, lower sweep.workers")
    except ray.exceptions.RayTaskError as error:
        return AttackCrash(first_line(error))
    return None if said is None else raised(*said)


class _Actor:
    """Does jobs, one after the other."""

    def __init__(self, prepare: Prepare, arguments: tuple[Any, ...], shared: str) -> None:
        self._refused = "" if Path(shared).is_file() else f"does not see {shared}"
        self._stack = ExitStack()
        self._work = self._stack.enter_context(prepare(*arguments))

    def confirm_start(self) -> None:
        """Answer once there is a process for it."""

    def do(self, job: Job) -> tuple[str, str, str] | None:
        """Do a job; what it raised, as `describe` tells it."""
        import platform

        if self._refused:
            error = RunError(f"host {platform.node()} {self._refused}; name a store and an --out that all hosts share")
            return describe(error)
        try:
            self._work(job, lambda iteration, iterations, values: None)
        except BaseException as error:  # also sys.exit, which may end nothing but this job
            return describe(error)
        return None
