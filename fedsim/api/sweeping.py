"""A sweep in Python: `fedsim.sweep` runs the cells of a sweep file, side by side, into tables and a page."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsim.api.arguments import check_changes, copy_tables
from fedsim.api.cell_runner import job_runner
from fedsim.api.logs import log_to_file
from fedsim.api.objects import name_objects
from fedsim.api.runs import Report
from fedsim.base.environment import environment
from fedsim.base.errors import ConfigError, FedsimError
from fedsim.base.files import write_text
from fedsim.base.machine import count_cores, free_memory
from fedsim.base.progress import ProgressListener, listen_to_progress, report_progress
from fedsim.base.randomness import serialize_calls
from fedsim.base.workers import run_in_processes
from fedsim.federation import lock
from fedsim.federation.app_file import AppFile
from fedsim.federation.config import Config
from fedsim.federation.flower_app import read_app
from fedsim.federation.run_folder import default_folder
from fedsim.report.sweep_page import FILE, PAGE, write_sweep_page
from fedsim.report.undefended_leaks import explain_no_leak
from fedsim.sweeps.board import SweepBoard
from fedsim.sweeps.cells import SweepCell
from fedsim.sweeps.file import SweepFile, SweepTable, parse_sweep, read_sweep
from fedsim.sweeps.plan import plan_sweep
from fedsim.sweeps.queue import JobQueue, SweepJob
from fedsim.sweeps.store import CellStore
from fedsim.sweeps.table import SweepTableFile, read_cells, read_table

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second

log = logging.getLogger(__name__)
STORE = Path("runs") / "cells"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""For processes that jobs run in, of which there is one for each core."""
_PAUSE_FACTOR = 100
"""Pause between two writes of the tables, as a multiple of the time that writing takes."""


@serialize_calls
def sweep(
    experiment: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    app: str | Path | None = None,
    cells: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    trust: bool = False,
    progress: ProgressListener | None = None,
) -> Sweep:
    """Run all cells of a sweep that are not done yet, side by side, and write their tables and a page.

    Args:
        experiment: a sweep file, or its tables as a dict.
        out: the folder for the tables; `runs/NAME` by default for a file `NAME.toml`.
        app: the folder of a Flower app, which each cell runs in the place of an experiment; the file is one as for
            `fedsim.run_app`, with a [sweep] table.
        cells: the store of cells, which sweeps share; `runs/cells` by default. An app's cells are kept in `out`.
        set: settings to change, such as `{"federation.rounds": 3, "sweep.seeds": [1]}`.
        trust: import code that a file in a run folder names.
        progress: called as `progress(what, done, total)`.

    Returns:
        The sweep, whose `failures` say which cells failed; the others are in its tables.

    Raises:
        FedsimError: the request is not valid, and nothing was started; or a folder cannot be written.
    """
    changes, kind = check_changes({} if set is None else set), Config if app is None else AppFile
    if isinstance(experiment, str | Path):
        path = Path(experiment)
        file, folder = read_sweep(path, changes, kind), default_folder(path)
    else:
        tables = copy_tables(experiment)
        name_objects(tables)
        file, folder = parse_sweep(tables, "sweep", Path.cwd(), changes=changes, kind=kind), None
    if out is None and folder is None:
        raise ConfigError("out: a sweep that is in no file has no name; name its folder")
    sweep_folder = Path(out) if out is not None else folder
    assert sweep_folder is not None
    with listen_to_progress(progress):
        if app is not None:
            from fedsim.api.app_sweeps import run_app_sweep  # imports Flower

            run_app_sweep(file, read_app(Path(app), trust=trust), sweep_folder, trust=trust)
            return Sweep(sweep_folder)
        run_sweep(file, sweep_folder, CellStore(Path(cells or STORE)), trust=trust)
    return Sweep(sweep_folder)


class Sweep:
    """The folder of a sweep.

    Each property reads its files anew, and raises RunError where one is missing, damaged or not what the sweep wrote.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        text = repr(str(self.path))
        with suppress(FedsimError):
            states = Counter(row["state"] for row in read_cells(self.path).rows)
            text += f", cells: {', '.join(f'{count} {state}' for state, count in states.items())}"
        return f"Sweep({text})"

    @property
    def table(self) -> pd.DataFrame:
        """A row for each score, see `fedsim.sweeps.table`."""
        return _frame(read_table(self.path), texts=("cell", "federation", "round"))

    @property
    def cells(self) -> pd.DataFrame:
        """A row for each cell: whether it is done, failed or does not apply, and why."""
        return _frame(read_cells(self.path), texts=("cell", "federation", "reason"))

    @property
    def failures(self) -> list[str]:
        """A sentence for each cell that failed."""
        table = read_cells(self.path)
        sentences = []
        for row in table.rows:
            if row["state"] == "failed":
                cell = ", ".join(f"{axis}={row[axis]}" for axis in (*table.axes, "attack", "seed"))
                sentences.append(f"{cell}: {row['reason']}")
        return sentences

    @serialize_calls
    def report(self) -> Report:
        """Write `sweep.html` anew; the value shows it in a notebook."""
        return Report(write_sweep_page(self.path))


def run_sweep(file: SweepFile, folder: Path, store: CellStore, *, trust: bool = False) -> SweepBoard:
    """Run the cells of a sweep that are not done yet, and write its tables and page."""
    check_sweep_folder(folder)
    with lock.lock_folder(folder), log_to_file(folder / "log.txt"):
        store.create_folders()
        plan = plan_sweep(file, store, trust=trust)
        (folder / PAGE).unlink(missing_ok=True)  # it may be of another sweep that was here
        write_text(folder / FILE, tomli_w.dumps(file.tables))
        board = SweepBoard(folder, store, plan)
        board.write()
        log.info("%s", plan.summary)
        try:
            _do_jobs(board, file.sweep)
        finally:
            board.write()
            write_sweep_page(folder)
    return board


def check_sweep_folder(folder: Path) -> None:
    """Raise ConfigError where `folder` holds something else than a sweep."""
    if not folder.is_dir() or (folder / FILE).exists():
        return
    if other_files := sorted({path.name for path in folder.iterdir()} - {lock.NAME, "log.txt"}):
        raise ConfigError(f"{folder}: holds {other_files[0]} and no sweep; move it away, or choose another folder")


def _do_jobs(board: SweepBoard, sweep: SweepTable) -> None:
    """Do all jobs of a plan, those on controls first, and write the tables from time to time."""
    plan = board.plan
    total, num_done, pause = len(plan.remaining_cells), 0, 0.0
    if not total:
        return
    stages = _SweepStages(board, stop_without_leak=sweep.stop_without_leak)
    queue = JobQueue([], [], sweep.workers or count_cores(), sys.maxsize if sweep.address else free_memory())
    stages.fill(queue)
    for finished_cell in (*plan.finished_cells.values(), *plan.finished_federations.values()):
        queue.record_memory(finished_cell.memory)
    report_progress("cells", 0, total)
    last_write = time.monotonic()
    with environment(_ONE_THREAD):
        for job, error in _run_jobs(queue, sweep, board):
            waiting = queue.record_end(job, well=error is None)
            if (marker := board.record_end(job, error, waiting)) is not None:
                queue.record_memory(marker.memory)
            num_done += len(waiting) + (not job.federates)
            stages.record_end(job, waiting, queue)
            log.info("%s: %s", job.name, "failed" if marker is None else f"done in {marker.seconds:.1f} s")
            if time.monotonic() > last_write + pause:
                start = time.monotonic()
                board.write()
                last_write = time.monotonic()
                pause = _PAUSE_FACTOR * (last_write - start)
            report_progress("cells", num_done, total)


class _SweepStages:
    """The two stages of a sweep: the federations of controls with their cells, and all others.

    Between them it is known whether anything leaks without a defense.
    """

    def __init__(self, board: SweepBoard, *, stop_without_leak: bool) -> None:
        self._board, self._stop_without_leak = board, stop_without_leak
        plan = board.plan
        first = plan.control_federations
        stages = []
        for is_first in (True, False):
            federations = [cell for cell in plan.remaining_federations if (cell.federation in first) == is_first]
            cells = [cell for cell in plan.remaining_cells if (cell.federation in first) == is_first]
            stages.append((federations, cells))
        self._control_jobs, self._other_jobs = stages
        self._pending = {cell.key for cell in self._control_jobs[1]}

    def fill(self, queue: JobQueue) -> None:
        """Add the jobs on controls to `queue`, or where these are done all others."""
        queue.add(*self._control_jobs)
        if not self._pending:
            self._add_others(queue)

    def record_end(self, job: SweepJob, waiting: Sequence[SweepCell], queue: JobQueue) -> None:
        """Record the end of a job; add the other jobs after the last one on controls."""
        if not self._pending:
            return
        self._pending -= {cell.key for cell in waiting}
        if not job.federates:
            self._pending.discard(job.cell.key)
        if not self._pending:
            self._add_others(queue)

    def _add_others(self, queue: JobQueue) -> None:
        """Add the other jobs, unless nothing leaks without a defense and the sweep is to stop then."""
        rows = [{name: str(value) for name, value in row.items()} for row in self._board.score_rows()]
        warning = explain_no_leak(rows, self._board.plan.grid.axes) if self._other_jobs[1] else ""
        if warning and self._stop_without_leak:
            self._board.skipped = f"{warning} (sweep.stop_without_leak)"
            log.warning("%s; the other cells are skipped (sweep.stop_without_leak)", warning)
            return
        if warning:
            log.warning("%s; the other cells still run, unless sweep.stop_without_leak = true", warning)
        queue.add(*self._other_jobs)


def _run_jobs(queue: JobQueue, sweep: SweepTable, board: SweepBoard) -> Iterator[tuple[SweepJob, BaseException | None]]:
    """Do the jobs of `queue`; yield each with what it raised, once it is done."""
    arguments = (CellStore(board.store.path.resolve()),)
    if sweep.on == "ray":
        from fedsim.sweeps.on_ray import run_in_actors

        return run_in_actors(
            queue, sweep.workers, job_runner, arguments, sweep.address, (board.folder / FILE).resolve()
        )
    return run_in_processes(queue, sweep.workers or count_cores(), job_runner, arguments, lambda *progress: None)


def _frame(table: SweepTableFile, texts: tuple[str, ...]) -> pd.DataFrame:
    """Return a table as a data frame; labels stay what they are, also `none`."""
    import pandas as pd

    return pd.read_csv(StringIO(table.text), dtype=dict.fromkeys(texts, str), keep_default_na=False, na_values=[""])
