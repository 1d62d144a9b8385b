"""Command `fedsim sweep`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column

from fedsim.base.errors import ConfigError, number_of
from fedsim.base.grouping import group_by
from fedsim.cli.options import DataDir, Key, Overrides, Quiet, Trust, Verbose, console, finish, new_table

if TYPE_CHECKING:
    from fedsim.sweeps.grid import GridPoint
    from fedsim.sweeps.plan import SweepPlan


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file.")],
    app: Annotated[
        Path | None,
        typer.Option("--app", metavar="FOLDER", help="Run the Flower app in this folder, in place of an experiment."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the tables; runs/NAME by default.")] = None,
    cells: Annotated[
        Path | None, typer.Option(help="The store of finished cells, which sweeps share; runs/cells by default.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the cells, which are done and which do not apply; run nothing."),
    ] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Run a grid of attacks x defenses x settings x seeds; the same command resumes it."""
    from fedsim.federation.experiment_file import parse_override
    from fedsim.sweeps.file import read_sweep
    from fedsim.sweeps.grid import build_grid

    changes = [parse_override(override) for override in overrides or []]
    # What is advised next repeats the settings, so that cells that are done are not run again.
    words = ["fedsim", "sweep", str(file)]
    for override in overrides or []:
        words += ["--set", override]
    for option, path in (("--app", app), ("--out", out), ("--cells", cells)):
        words += [option, str(path)] if path else []
    if app is not None:
        if cells is not None:
            raise ConfigError("--cells: the cells of an app are stored next to the tables; leave it out, or set --out")
        _sweep_app(file, app, changes, out, words, dry_run=dry_run, quiet=quiet, verbose=verbose, trust=trust)
        return
    sweep_file = read_sweep(file, changes)
    build_grid(sweep_file)

    # What follows takes seconds to import, so a mistyped key is reported before.
    from fedsim.api.linting import log_pitfalls_of_file
    from fedsim.api.sweeping import STORE, run_sweep
    from fedsim.base.machine import count_cores
    from fedsim.cli.work_shown import show_work
    from fedsim.federation.run_folder import default_folder
    from fedsim.sweeps.plan import plan_sweep
    from fedsim.sweeps.store import CellStore

    store, folder = CellStore(cells or STORE), out or default_folder(file)
    with show_work(quiet, verbose):
        log_pitfalls_of_file(file, changes, trust=trust)
        if dry_run:
            plan = plan_sweep(sweep_file, store, trust=trust)
        else:
            board = run_sweep(sweep_file, folder, store, trust=trust)
    if dry_run:
        _show_plan(plan, sweep_file.sweep.workers or count_cores())
        return
    _show_left_out(board.plan)
    _show_results(folder, words, quiet=quiet)
    finish(board.failure_summaries)


def _sweep_app(
    file: Path,
    app: Path,
    changes: Sequence[tuple[str, Any]],
    out: Path | None,
    words: Sequence[str],
    *,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    trust: bool,
) -> None:
    """Run the cells of a sweep of a Flower app, one after the other."""
    from fedsim.api.app_sweeps import build_app_cells, run_app_sweep
    from fedsim.cli.work_shown import show_work
    from fedsim.federation.app_file import AppFile
    from fedsim.federation.flower_app import read_app
    from fedsim.federation.run_folder import default_folder
    from fedsim.sweeps.file import read_sweep

    sweep_file, flower_app = read_sweep(file, changes, AppFile), read_app(app, trust=trust)
    folder = out or default_folder(file)
    if dry_run:
        for cell in build_app_cells(sweep_file, flower_app, trust=trust):
            console.print(cell.point.name + (" (control)" if cell.point.is_added else ""), markup=False)
        return
    with show_work(quiet, verbose):
        failures = run_app_sweep(sweep_file, flower_app, folder, trust=trust)
    _show_results(folder, words, quiet=quiet)
    finish(failures)


def _show_results(folder: Path, words: Sequence[str], *, quiet: bool) -> None:
    """Print the answer of a sweep, what to do next, and where its tables are."""
    from fedsim.cli.work_shown import show_sweep_answer
    from fedsim.report.next_steps import suggest_after_sweep
    from fedsim.report.sweep_answer import answer_sweep
    from fedsim.report.sweep_page import PAGE, is_app_sweep, knows_defenses, read_sweep_file
    from fedsim.sweeps.table import TABLE, read_cells, read_table

    scores = read_table(folder)
    answer = answer_sweep(scores.rows, read_cells(folder).rows, scores.axes)
    steps = suggest_after_sweep(
        answer,
        knows_defenses=knows_defenses(scores.rows),
        folder=str(folder),
        command=shlex.join(words),
        is_app=is_app_sweep(folder, scores.rows),
        tables=read_sweep_file(folder)[1],
    )
    show_sweep_answer(answer, steps)
    if not quiet:
        console.print(f"table: {folder / TABLE}", soft_wrap=True, markup=False)
        console.print(f"report: {folder / PAGE}", soft_wrap=True, markup=False)


def _show_plan(plan: SweepPlan, workers: int) -> None:
    """Print the cells, what they share, what is done, and how long the rest may take."""
    to_do = {cell.point.name for cell in plan.remaining_cells}
    states = [(cell.point, "to do" if cell.point.name in to_do else "done") for cell in plan.cells]
    table = new_table(*(Column(name) for name in (*plan.grid.label_axes, "seeds", "cells")), box=SIMPLE_HEAD)
    for labels, points in group_by(states, lambda item: tuple(item[0].labels.values())).items():
        counts = Counter(state for _, state in points)
        seeds = ", ".join(str(point.seed) for point, _ in points)
        table.add_row(*map(escape, labels), seeds, ", ".join(f"{count} {state}" for state, count in counts.items()))
    console.print(table)
    _show_left_out(plan)
    shares = sorted(set(Counter(cell.federation for cell in plan.cells).values()))
    shared = number_of(shares[0], "cell") if len(shares) == 1 else f"{shares[0]} to {shares[-1]} cells"
    sentences = f"{plan.summary}; each federation runs once and is shared by {shared}", _estimate(plan, workers)
    console.print(*sentences, sep="\n", highlight=False, soft_wrap=True)


def _estimate(plan: SweepPlan, workers: int) -> str:
    if not plan.remaining_cells:
        return "all cells are done"
    if plan.estimated_seconds is None:
        return "no cell is done yet, so the time cannot be estimated"
    minutes = plan.estimated_seconds / 60 / min(workers, len(plan.remaining_cells))
    if minutes < 2:
        duration = number_of(max(1, round(60 * minutes)), "second")
    elif minutes < 120:
        duration = f"{minutes:.0f} minutes"
    else:
        duration = f"{minutes / 60:.1f} hours"
    return f"about {duration} remain with {number_of(workers, 'worker')}, estimated from finished cells"


def _show_left_out(plan: SweepPlan) -> None:
    """Print which cells do not apply, and why."""
    if not plan.inapplicable:
        return
    table = new_table("why", "cells that do not apply", title="Does not apply", box=SIMPLE_HEAD, show_lines=True)
    for reason, pairs in group_by(plan.inapplicable, lambda pair: pair[1]).items():
        table.add_row(escape(reason), escape(_labels_text([point for point, _ in pairs])))
    console.print(table)


def _labels_text(points: Sequence[GridPoint]) -> str:
    """List the labels that each axis has among these points."""
    texts = []
    for axis in points[0].row:
        labels = dict.fromkeys(str(point.row[axis]) for point in points)
        texts.append(f"{axis}: {', '.join(labels)}")
    return "; ".join(texts)
