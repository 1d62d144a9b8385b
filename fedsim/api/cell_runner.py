"""Work of one process of a sweep: run a federation, or attack one, and store the result as a cell."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedsim.api import pipeline
from fedsim.api.adversaries import Adversary
from fedsim.base.errors import FedsimError, RunError
from fedsim.base.machine import peak_memory, reset_peak_memory
from fedsim.base.randomness import use_one_thread
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.integrity import compare_with_manifest
from fedsim.sweeps import store as cell_store
from fedsim.sweeps.queue import SweepJob
from fedsim.sweeps.rows import sweep_rows
from fedsim.sweeps.store import CellStore, StoreEntry

log = logging.getLogger(__name__)
Follow = Callable[[int, int, Mapping[str, float]], None]
"""Called with iteration, number of iterations and values while a job runs."""


@contextmanager
def job_runner(store: CellStore) -> Iterator[Callable[[SweepJob, Follow], None]]:
    """Yield the function that does a job, on one thread, since there is one process for each core."""
    logger, store_logger = logging.getLogger("fedsim"), logging.getLogger(cell_store.__name__)
    old_propagate, old_store_level = logger.propagate, store_logger.level
    logger.propagate = False  # the process that started this one shows what is to be shown
    store_logger.setLevel(logging.ERROR)  # and has reported which cells are damaged

    def do(job: SweepJob, follow: Follow) -> None:
        with _prefixed_warnings(job.name) as handler:
            (_federate if job.federates else _attack)(store, job, handler)

    try:
        with use_one_thread():
            yield do
    finally:
        logger.propagate = old_propagate
        store_logger.setLevel(old_store_level)


def _federate(store: CellStore, job: SweepJob, handler: _PrefixHandler) -> None:
    """Run a federation, unless it is there by now; one that crashed is run again."""
    cell_place = store.federation(job.cell.federation)
    with lock.lock_folder(cell_place.folder.path, cell_place.folder, wait=True):
        marker = cell_place.read_intact()
        if marker is not None and not marker.crashed:
            return
        with measure_resources() as resources:
            done = _resume(cell_place) or run_anew(cell_place, job.cell.federation_config)
        cell_place.write_marker(rows=[], failures=done.failures, crashed=handler.crashed, **resources)


def _resume(place: StoreEntry) -> pipeline.AuditResult | None:
    """Resume an interrupted federation to its end; None where there is none, or it cannot go on."""
    if place.marker_path.exists() or not place.folder.checkpoint.is_file():  # one that was finished is damaged
        return None
    try:
        done = pipeline.resume(place.folder, trust=True)
        if differences := compare_with_manifest(place.folder).differences:
            raise RunError(differences[0])
    except FedsimError as error:
        log.warning("restarted, because it cannot be resumed: %s", error)
        return None
    return done


def run_anew(place: StoreEntry, config: Config) -> pipeline.AuditResult:
    """Run a federation from its first round, and remove what was begun or damaged in its place, which is locked."""
    place.clear()
    return pipeline.run(config, place.folder, overwrite=True)


def _attack(store: CellStore, job: SweepJob, handler: _PrefixHandler) -> None:
    """Attack a federation, unless that is done by now; findings that are there already are kept."""
    cell, cell_place, federation = job.cell, store.cell(job.cell.key), store.federation(job.cell.federation)
    with lock.lock_folder(cell_place.folder.path, cell_place.folder, wait=True):
        marker = cell_place.read_intact()
        if marker is not None and not marker.crashed:
            return
        recording = federation.read_intact()
        if recording is None:
            raise RunError(
                f"{federation.folder.path}: is gone, or was damaged meanwhile; the same sweep makes it again"
            )
        with measure_resources() as resources:
            if not cell_store.is_prepared(cell_place, cell.config, recording):
                cell_store.prepare_cell(cell_place, cell.config, federation)
            done = pipeline.attack(cell_place.folder, Adversary(), trust=True)
        cell_place.write_marker(
            rows=sweep_rows(cell_place.folder, cell.title, done.planned_jobs, role=cell.config.adversary.role),
            failures=list(dict.fromkeys([*recording.failures, *done.failures])),  # the federation may be removed
            crashed=recording.crashed or handler.crashed,
            **resources,
        )


@contextmanager
def measure_resources() -> Iterator[dict[str, Any]]:
    """Measure the block within; the yielded dict has its `seconds` and `memory` afterwards."""
    resources: dict[str, Any] = {}
    reset_peak_memory()
    start = time.monotonic()
    yield resources
    resources |= {"seconds": round(time.monotonic() - start, 2), "memory": peak_memory()}


@contextmanager
def _prefixed_warnings(name: str) -> Iterator[_PrefixHandler]:
    """Prefix warnings with the name of the cell."""
    logger = logging.getLogger("fedsim")
    handler = _PrefixHandler(name, list(logger.handlers))
    logger.handlers = [handler]
    try:
        yield handler
    finally:
        logger.handlers = handler.handlers


class _PrefixHandler(logging.Handler):
    """Passes warnings on with a name in front; an error that is no sentence has a traceback and marks a crash."""

    def __init__(self, cell_name: str, handlers: list[logging.Handler]) -> None:
        super().__init__(logging.WARNING)
        self.cell_name, self.handlers, self.crashed = cell_name, handlers, False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        self.crashed |= record.levelno >= logging.ERROR and bool(record.exc_info)
        prefixed = copy.copy(record)
        prefixed.msg, prefixed.args = f"{self.cell_name}: {record.getMessage()}", None
        for handler in self.handlers:
            handler.handle(prefixed)
