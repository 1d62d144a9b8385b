"""`fedsim sweep`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedsim.cli.options import (
    DataDir,
    Key,
    Overrides,
    Quiet,
    Trust,
    Verbose,
    console,
    finish,
    number_of,
    use_data_dir,
    use_key,
)

if TYPE_CHECKING:
    from fedsim.sweeps.grid import Point
    from fedsim.sweeps.plan import Plan


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the tables; runs/NAME by default.")] = None,
    cells: Annotated[
        Path | None, typer.Option(help="The store of finished cells, which sweeps share; runs/cells by default.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say which cells there are, what is done and what does not apply; no more."),
    ] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Run many experiments side by side: attacks x defenses x settings x seeds; the same command goes on."""
    from fedsim.experiments.reading import parsed
    from fedsim.sweeps.file import read_sweep
    from fedsim.sweeps.grid import grid_of

    use_data_dir(data_dir)
    use_key(key)
    described = read_sweep(file, [parsed(override) for override in overrides or []])
    grid_of(described)

    # What follows takes seconds to import, so a mistyped key is told of before.
    from fedsim.cli.work_shown import shown
    from fedsim.machine import cores
    from fedsim.reporting.sweep_page import PAGE
    from fedsim.sweeps.plan import planned
    from fedsim.sweeps.store import Store
    from fedsim.sweeps.table import TABLE
    from fedsim.workflow.sweeping import STORE, default_folder, swept

    store, folder = Store(cells or STORE), out or default_folder(file)
    with shown(quiet, verbose):
        if dry_run:
            plan = planned(described, store, trust=trust)
        else:
            board = swept(described, folder, store, trust=trust)
    if dry_run:
        _show_plan(plan, described.sweep.workers or cores())
        return
    _show_left_out(board.plan)
    if not quiet:
        console.print(f"table: {folder / TABLE}", soft_wrap=True, markup=False)
        console.print(f"report: {folder / PAGE}", soft_wrap=True, markup=False)
    finish(board.failures)


def _show_plan(plan: Plan, workers: int) -> None:
    """Print the cells, what they share, what is done, and how long the rest may take."""
    to_do = {cell.point.name for cell in plan.to_do}
    states = [(cell.point, "to do" if cell.point.name in to_do else "done") for cell in plan.cells]
    table = Table(*(Column(name, overflow="fold") for name in (*plan.grid.labelled, "seeds", "cells")), box=SIMPLE_HEAD)
    groups: dict[tuple[str, ...], list[tuple[Point, str]]] = defaultdict(list)
    for point, state in states:
        groups[tuple(point.labels.values())].append((point, state))
    for labels, found in groups.items():
        counts = Counter(state for _, state in found)
        seeds = ", ".join(str(point.seed) for point, _ in found)
        table.add_row(*map(escape, labels), seeds, ", ".join(f"{count} {state}" for state, count in counts.items()))
    console.print(table)
    _show_left_out(plan)
    shares = sorted(set(Counter(cell.federation for cell in plan.cells).values()))
    shared = number_of(shares[0], "cell") if len(shares) == 1 else f"{shares[0]} to {shares[-1]} cells"
    told = f"{plan.sentence}; each federation is run once and shared by {shared}", _estimate(plan, workers)
    console.print(*told, sep="\n", highlight=False, soft_wrap=True)


def _estimate(plan: Plan, workers: int) -> str:
    if not plan.to_do:
        return "nothing is left to do"
    if plan.seconds is None:
        return "no cell is done yet, so nobody can say how long they take"
    minutes = plan.seconds / 60 / min(workers, len(plan.to_do))
    if minutes < 2:
        told = number_of(max(1, round(60 * minutes)), "second")
    else:
        told = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    return f"about {told} are left with {number_of(workers, 'worker')}, by what finished cells took"


def _show_left_out(plan: Plan) -> None:
    """Print which cells do not apply, and why."""
    if not plan.left_out:
        return
    table = Table("why", "cells that do not apply", title="Does not apply", box=SIMPLE_HEAD, show_lines=True)
    reasons: dict[str, list[Point]] = defaultdict(list)
    for point, reason in plan.left_out:
        reasons[reason].append(point)
    for reason, points in reasons.items():
        table.add_row(escape(reason), escape(_together(points)))
    console.print(table)


def _together(points: Sequence[Point]) -> str:
    """These points by the labels that each axis has among them."""
    axes = list(points[0].row)
    return "; ".join(f"{axis}: {', '.join(_distinct(str(point.row[axis]) for point in points))}" for axis in axes)


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
