"""Progress of jobs, the warnings of attacks, and the sentence for a job that failed."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedsim.auditing.plan import Job
from fedsim.errors import AttackCrash, FedsimError, one_line, what_it_said
from fedsim.progress import tell


def counted(results: Iterable[tuple[Job, Any]], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    """Pass `results` on, and report for each attack how many of its jobs are done."""
    totals, done = Counter(job.title for job in jobs), Counter[str]()
    for title, total in totals.items():
        tell(title, 0, total)
    for job, result in results:
        yield job, result
        done[job.title] += 1
        tell(job.title, done[job.title], totals[job.title])


@contextmanager
def overheard() -> Iterator[list[str]]:
    """The warnings of attacks meanwhile, each sentence once; the report shows them beside the findings."""
    heard: dict[str, None] = {}

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard[record.getMessage()] = None

    listener, logger, told = Listener(logging.WARNING), logging.getLogger("fedsim.adversaries"), list[str]()
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)
        told += heard


def sentence(job: Job, error: BaseException) -> str:
    """The sentence for `job`, which failed with `error`."""
    where = f"round {job.round}, client {job.victim}: "
    if isinstance(error, FedsimError) and not isinstance(error, AttackCrash):
        told = re.search(rf"client {job.victim}\b", str(error))
        return f"{job.title}, {'' if told else where}{error}"
    what = str(error).splitlines()[0] if isinstance(error, AttackCrash) else one_line(what_it_said(error))
    return f"{job.title}, {where}{what}"
