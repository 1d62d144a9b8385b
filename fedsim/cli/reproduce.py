"""`fedsim reproduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedsim.cli.options import DataDir, Quiet, Verbose, console, finish, use_data_dir
from fedsim.errors import ConfigError

if TYPE_CHECKING:
    from fedsim.reproduce.papers import Compared
    from fedsim.reproduce.recipes import Scale, ScaleName

_COLOURS = {"met": "green", "missed": "red", "not comparable": "dim"}


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="PAPER/TABLE", help="A table such as sme/table2, or a paper such as sme; else all."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Run it: `quick` takes minutes a table, `full` hours. Without, show what is kept."),
    ] = None,
    cells: Annotated[
        Path | None, typer.Option(help="The store of finished cells, which sweeps share; runs/cells by default.")
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Put our figures beside those of papers: kept ones or, with --scale, new ones.

    Without a name, say which tables there are. After an interrupt the same command goes on.
    """
    from fedsim.reproduce.papers import chosen, papers

    use_data_dir(data_dir)
    tables = (
        chosen(name) if name is not None else [(paper, table) for paper in papers() for table in papers()[paper].table]
    )
    if scale is None:
        _list(tables) if name is None else _show(tables)
        return
    if scale not in ("quick", "full"):
        raise ConfigError(f"--scale: expected quick or full, got {scale!r}")
    _run(tables, scale, cells, quiet=quiet, verbose=verbose)  # type: ignore[arg-type]


def _list(tables: Sequence[tuple[str, str]]) -> None:
    """Every table with what is kept of it, what makes it again, and how long that takes."""
    from fedsim.reproduce.papers import results, verdicts
    from fedsim.reproduce.recipes import made_by

    names = ("table", "last result", "kept", "quick run", "made again by")
    shown = Table(*(Column(name, no_wrap=name in names[:2]) for name in names), box=SIMPLE_HEAD)
    for paper, table in tables:
        kept = [one for one in results()[paper].kept if one.table == table]
        latest = str(max(one.date for one in kept)) if kept else "not measured"
        quick = [one for one in kept if one.name == "quick"]
        others = [one for one in kept if one not in quick]
        shown.add_row(
            f"{paper}/{table}",
            latest,
            verdicts(paper, others),
            verdicts(paper, quick),
            made_by(paper, table),
        )
    console.print(shown)
    console.print("fedsim reproduce TABLE shows its figures, with --scale quick or full runs it", markup=False)


def _show(tables: Sequence[tuple[str, str]]) -> None:
    """What is kept of each table, beside the paper's."""
    from fedsim.reproduce.papers import papers, results
    from fedsim.reproduce.recipes import made_by

    for paper, table in tables:
        asked = papers()[paper].table[table]
        console.print(f"\n{paper}/{table}: {asked.title}", style="bold", markup=False)
        console.print(f"paper: {asked.setting}", markup=False, highlight=False)
        console.print(f"differs: {asked.differs.strip()}", markup=False, highlight=False)
        console.print(f"made again by: {made_by(paper, table)}", markup=False, highlight=False)
        for kept in [one for one in results()[paper].kept if one.table == table]:
            _print(paper, table, f"{kept.name}, {kept.date}", _beside(paper, table, kept.rows))
            console.print(f"{kept.note.strip()}\n{kept.command.strip()}", markup=False, highlight=False)


def _run(
    tables: Sequence[tuple[str, str]], scale: ScaleName, cells: Path | None, *, quiet: bool, verbose: bool
) -> None:
    """Run the sweeps of these tables, one after another."""
    from fedsim.reproduce.recipes import recipe_of

    made = {place: found for place in tables if (found := recipe_of(*place))}
    if not made:
        from fedsim.reproduce.running import recipe

        recipe(*tables[0])
    if left := [f"{paper}/{table}" for paper, table in tables if (paper, table) not in made]:
        console.print(f"Left out, because scripts make them: {', '.join(left)}.", markup=False, highlight=False)
    _say_how_long({f"{paper}/{table}, {scale}": one.scale(scale) for (paper, table), one in made.items()})

    # What follows takes seconds to import, so a name that nobody published is told before.
    from fedsim.cli.work_shown import shown
    from fedsim.reproduce.running import RESULT, reproduced

    failures: list[str] = []
    for paper, table in made:
        with shown(quiet, verbose):
            outcome = reproduced(paper, table, scale, cells)
        _print(paper, table, outcome.kept.name, outcome.beside)
        console.print(
            f"{outcome.kept.note}\nkept: {outcome.folder / RESULT}", markup=False, highlight=False, soft_wrap=True
        )
        for sentence in outcome.left_out:
            console.print(f"does not apply: {sentence}", markup=False, highlight=False, soft_wrap=True)
        failures += outcome.failures
    finish(failures)


def _say_how_long(scales: Mapping[str, Scale]) -> None:
    from fedsim.reproduce.recipes import long

    for name, one in scales.items():
        console.print(f"{name}: {one.note} About {long(one.minutes)} on {one.on}.", markup=False, highlight=False)
    if len(scales) > 1:
        whole = long(sum(one.minutes for one in scales.values()))
        console.print(f"All together about {whole}.", markup=False, highlight=False)


def _print(paper: str, table: str, title: str, rows: Sequence[Compared]) -> None:
    """Ours beside the paper's, with difference and verdict."""
    from fedsim.reproduce.papers import papers

    quantities = papers()[paper].table[table].quantities
    shown = Table("", "paper", "ours", "difference", "verdict", box=SIMPLE_HEAD, title=escape(title))
    for row, found in groupby(rows, key=lambda one: one.row):
        shown.add_row(f"[bold]{escape(row)}[/]")
        for one in found:
            shown.add_row(f"  {escape(quantities[one.quantity].title)}", *_cells(one))
    console.print(shown)


def _cells(one: Compared) -> tuple[str, ...]:
    """The paper's figure, ours, the difference and the verdict; only ours where the paper has none."""
    from fedsim.reproduce.figures import difference_text

    if one.paper is None or one.verdict is None:
        return "", one.ours.text, "", ""
    verdict = f"[{_COLOURS[one.verdict]}]{one.verdict}[/]"
    return one.paper.text, one.ours.text, difference_text(one.ours, one.paper), verdict


def _beside(paper: str, table: str, rows: Mapping[str, Mapping[str, str]]) -> list[Compared]:
    from fedsim.reproduce.papers import compared

    return compared(paper, table, rows, f"kept: {paper}/{table}")
