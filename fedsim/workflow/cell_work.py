"""What a process of a sweep does: run a federation, or attack one, into its place in the store of cells."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedsim.errors import FedsimError, RunError
from fedsim.experiments import lock
from fedsim.experiments.config import Config
from fedsim.experiments.integrity import held_against_manifest
from fedsim.machine import forget_peak, peak
from fedsim.randomness import one_thread
from fedsim.sweeps import store as kept
from fedsim.sweeps.queue import Job
from fedsim.sweeps.rows import rows_of
from fedsim.sweeps.store import Place, Store
from fedsim.workflow import work
from fedsim.workflow.adversaries import Adversary

log = logging.getLogger(__name__)
Follow = Callable[[int, int, Mapping[str, float]], None]
"""Told how far a job is."""


@contextmanager
def doing(store: Store) -> Iterator[Callable[[Job, Follow], None]]:
    """Gives the function that does a job, on one thread, for there is one process a core."""
    logger, store_logger = logging.getLogger("fedsim"), logging.getLogger(kept.__name__)
    before = logger.propagate, store_logger.level
    logger.propagate = False  # who started this process shows what is to be shown
    store_logger.setLevel(logging.ERROR)  # and has told what is damaged

    def do(job: Job, follow: Follow) -> None:
        with _named(job.name) as teller:
            (_federate if job.federates else _attack)(store, job, teller)

    try:
        with one_thread():
            yield do
    finally:
        logger.propagate = before[0]
        store_logger.setLevel(before[1])


def _federate(store: Store, job: Job, teller: _Teller) -> None:
    """Run a federation, unless it is there by now; one that crashed is run again."""
    place = store.federation(job.cell.federation)
    with lock.held(place.folder.path, wait=True):
        before = place.finished()
        if before is not None and not before.crashed:
            return
        with measured() as used:
            done = _resumed(place) or begun(place, job.cell.federated)
        place.finish(rows=[], failures=done.failures, crashed=teller.crashed, **used)


def _resumed(place: Place) -> work.Done | None:
    """An interrupted federation that went on to its end; None where there is none, or it cannot go on."""
    if place.marker.exists() or not place.folder.checkpoint.is_file():  # one that was finished is damaged
        return None
    try:
        done = work.resume(place.folder, trust=True)
        if differences := held_against_manifest(place.folder.path).differences:
            raise RunError(differences[0])
    except FedsimError as error:
        log.warning("begun anew, because it cannot go on: %s", error)
        return None
    return done


def begun(place: Place, config: Config) -> work.Done:
    """A run from its first round; what was begun or damaged in its place, which is held, is removed."""
    place.clear()
    return work.run(config, place.folder, overwrite=True)


def _attack(store: Store, job: Job, teller: _Teller) -> None:
    """Attack a federation, unless that is done by now; findings that are there already are kept."""
    cell, place, federation = job.cell, store.cell(job.cell.key), store.federation(job.cell.federation)
    with lock.held(place.folder.path, wait=True):
        before = place.finished()
        if before is not None and not before.crashed:
            return
        recording = federation.finished()
        if recording is None:
            raise RunError(
                f"{federation.folder.path}: is gone, or was damaged meanwhile; the same sweep makes it again"
            )
        with measured() as used:
            if not kept.is_prepared(place, cell.config, recording):
                kept.prepare(place, cell.config, federation)
            done = work.attack(place.folder.path, Adversary(), trust=True)
        place.finish(
            rows=rows_of(place.folder, cell.title, done.planned),
            failures=list(dict.fromkeys([*recording.failures, *done.failures])),  # the federation may be removed
            crashed=recording.crashed or teller.crashed,
            **used,
        )


@contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """The seconds and the memory that what is within takes."""
    used: dict[str, Any] = {}
    forget_peak()
    began = time.monotonic()
    yield used
    used |= {"seconds": round(time.monotonic() - began, 2), "memory": peak()}


@contextmanager
def _named(name: str) -> Iterator[_Teller]:
    """Warnings say of which cell they are."""
    logger = logging.getLogger("fedsim")
    teller = _Teller(name, list(logger.handlers))
    logger.handlers = [teller]
    try:
        yield teller
    finally:
        logger.handlers = teller.others


class _Teller(logging.Handler):
    def __init__(self, name: str, others: list[logging.Handler]) -> None:
        super().__init__(logging.WARNING)
        self.about, self.others, self.crashed = name, others, False

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record on that begins with the name; an error that is no sentence has a traceback."""
        self.crashed |= record.levelno >= logging.ERROR and bool(record.exc_info)
        told = copy.copy(record)
        told.msg, told.args = f"{self.about}: {record.getMessage()}", None
        for handler in self.others:
            handler.handle(told)
