"""A sweep in Python: `fedsim.sweep` runs the cells of a sweep file, side by side, into tables and a page."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from fedsim.auditing.workers import in_processes
from fedsim.errors import ConfigError
from fedsim.experiments import lock
from fedsim.files import write_text
from fedsim.machine import cores, free_memory
from fedsim.progress import tell
from fedsim.randomness import one_at_a_time
from fedsim.reporting.sweep_page import FILE, PAGE, write_sweep_page
from fedsim.sweeps.board import Board
from fedsim.sweeps.file import SweepFile, SweepTable, read_sweep, sweep_of
from fedsim.sweeps.plan import planned
from fedsim.sweeps.queue import Job, Queue
from fedsim.sweeps.store import Store
from fedsim.sweeps.table import Table, read_cells, read_table
from fedsim.workflow.cell_work import doing
from fedsim.workflow.logs import Progress, kept, told
from fedsim.workflow.objects import name_objects
from fedsim.workflow.runs import Report, copied

log = logging.getLogger(__name__)
STORE = Path("runs") / "cells"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SELDOM = 100
"""How many times as long as writing the tables takes is waited before they are written again."""


@one_at_a_time
def sweep(
    experiment: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    cells: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    trust: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Run all cells of a sweep that are not done yet, side by side, and write their tables and a page.

    Args:
        experiment: a sweep file, or its tables as a dict.
        out: the folder for the tables; `runs/NAME` by default for a file `NAME.toml`.
        cells: the store of cells, which sweeps share; `runs/cells` by default.
        set: settings to change, such as `{"federation.rounds": 3, "sweep.seeds": [1]}`.
        trust: import code that a file in a run folder names.
        progress: called as `progress(what, done, total)`.

    Returns:
        The sweep, whose `failures` say which cells failed; the others are in its tables.

    Raises:
        FedsimError: the request is not valid, and nothing was started; or a folder cannot be written.
    """
    changes = _changes({} if set is None else set)
    if isinstance(experiment, str | Path):
        path = Path(experiment)
        file, folder = read_sweep(path, changes), default_folder(path)
    else:
        tables = copied(experiment)
        name_objects(tables)
        file, folder = sweep_of(tables, "sweep", Path.cwd(), changes=changes), None
    if out is None and folder is None:
        raise ConfigError("out: a sweep that is in no file has no name; name its folder")
    place = Path(out) if out is not None else folder
    assert place is not None
    with told(progress):
        swept(file, place, Store(Path(cells or STORE)), trust=trust)
    return Sweep(place)


class Sweep:
    """The folder of a sweep. Each property reads its files anew."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @property
    def table(self) -> pd.DataFrame:
        """A row for each score, see `fedsim.sweeps.table`.

        Raises:
            RunError: the table is missing or damaged, or is not what the sweep wrote.
        """
        return _frame(read_table(self.path), texts=("cell", "federation", "round"))

    @property
    def cells(self) -> pd.DataFrame:
        """A row for each cell: whether it is done, failed or does not apply, and why.

        Raises:
            RunError: the table is missing or damaged, or is not what the sweep wrote.
        """
        return _frame(read_cells(self.path), texts=("cell", "federation", "reason"))

    @property
    def failures(self) -> list[str]:
        """A sentence for each cell that failed.

        Raises:
            RunError: the table is missing or damaged, or is not what the sweep wrote.
        """
        table = read_cells(self.path)
        return [
            f"{', '.join(f'{axis}={row[axis]}' for axis in (*table.axes, 'attack', 'seed'))}: {row['reason']}"
            for row in table.rows
            if row["state"] == "failed"
        ]

    @one_at_a_time
    def report(self) -> Report:
        """Write `sweep.html` anew; the value shows it in a notebook.

        Raises:
            RunError: a table is missing or damaged, or the folder cannot be written.
        """
        return Report(write_sweep_page(self.path))


def default_folder(file: Path) -> Path:
    """`runs/NAME` for the sweep file `NAME.toml`."""
    return Path("runs") / file.stem


def swept(file: SweepFile, folder: Path, store: Store, *, trust: bool = False) -> Board:
    """Do what a sweep file asks for, as far as it is not done.

    Args:
        file: the sweep file.
        folder: of its tables.
        store: of its cells.
        trust: import code that a file in a run folder names.

    Raises:
        FedsimError: the request is not valid, and nothing was started; or a folder cannot be written.
    """
    _check_folder(folder)
    with lock.held(folder), kept(folder / "log.txt"):
        store.open()
        plan = planned(file, store, trust=trust)
        (folder / PAGE).unlink(missing_ok=True)  # it may tell of another sweep that was here
        write_text(folder / FILE, tomli_w.dumps(file.tables))
        board = Board(folder, store, plan)
        board.write()
        log.info("%s", plan.sentence)
        try:
            _work(board, file.sweep)
        finally:
            board.write()
            write_sweep_page(folder)
    return board


def _check_folder(folder: Path) -> None:
    """Raise ConfigError where `folder` holds something else than a sweep."""
    if not folder.is_dir() or (folder / FILE).exists():
        return
    if others := sorted({path.name for path in folder.iterdir()} - {lock.NAME, "log.txt"}):
        raise ConfigError(f"{folder}: holds {others[0]} and no sweep; move it away, or choose another folder")


def _work(board: Board, sweep: SweepTable) -> None:
    """Do all jobs of a plan, and write the tables whenever some are done."""
    plan = board.plan
    total, done, pause = len(plan.to_federate) + len(plan.to_do), 0, 0.0
    if not total:
        return
    queue = Queue(plan.to_federate, plan.to_do, sweep.workers or cores(), _memory(sweep))
    for known in (*plan.done.values(), *plan.federations.values()):
        queue.needs(known.memory)
    tell("cells", 0, total)
    written = time.monotonic()
    with _one_thread_each():
        for job, error in _side_by_side(queue, sweep, board):
            waiting = queue.ended(job, well=error is None)
            if (marker := board.ended(job, error, waiting)) is not None:
                queue.needs(marker.memory)
            done += 1 + len(waiting)
            log.info("%s: %s", job.name, "failed" if marker is None else f"done in {marker.seconds:.1f} s")
            if time.monotonic() > written + pause:
                began = time.monotonic()
                board.write()
                written = time.monotonic()
                pause = _SELDOM * (written - began)
            tell("cells", done, total)


def _side_by_side(queue: Queue, sweep: SweepTable, board: Board) -> Iterator[tuple[Job, BaseException | None]]:
    """Do the jobs of `queue`; each with what it raised, once it is done."""
    arguments = (Store(board.store.path.resolve()),)
    if sweep.on == "ray":
        from fedsim.sweeps.on_ray import in_actors

        return in_actors(queue, sweep.workers, doing, arguments, sweep.address, (board.folder / FILE).resolve())
    return in_processes(queue, sweep.workers or cores(), doing, arguments, _silent)


def _memory(sweep: SweepTable) -> int:
    """For all jobs together, in bytes; a cluster looks after its own."""
    return sys.maxsize if sweep.address else free_memory()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started within compute on one thread each, for there is one of them a core."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _changes(given: object) -> list[tuple[str, Any]]:
    """Settings to change.

    Raises:
        ConfigError: they are none.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"set: expected a dict of settings, got {type(given).__name__}")
    for key in given:
        if not isinstance(key, str) or not all(word.strip() for word in key.split(".")):
            raise ConfigError(f"set: expected keys such as 'federation.rounds', got {key!r}")
    return [(key, copied(value)) for key, value in given.items()]


def _frame(table: Table, texts: tuple[str, ...]) -> pd.DataFrame:
    """A table; labels stay what they are, also `none`."""
    return pd.read_csv(StringIO(table.text), dtype=dict.fromkeys(texts, str), keep_default_na=False, na_values=[""])


def _silent(job: Job, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
    """Report nothing: the cells that are done are told."""
