"""Command `fedsim reproduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column

from fedsim.base.errors import ConfigError
from fedsim.cli.options import DataDir, Quiet, Verbose, console, finish, new_table

if TYPE_CHECKING:
    from fedsim.api.reproduce.figures import FigureVerdict
    from fedsim.api.reproduce.papers import FigureComparison
    from fedsim.api.reproduce.recipes import Scale, ScaleName


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="PAPER/TABLE", help="A table such as sme/table2, or a paper such as sme; else all."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Run it: `quick` takes minutes per table, `full` hours. Without it, show stored figures."),
    ] = None,
    cells: Annotated[
        Path | None, typer.Option(help="The store of finished cells, which sweeps share; runs/cells by default.")
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare published figures with ours: stored ones or, with --scale, new ones.

    Without a name, list the tables. After an interruption, the same command continues.
    """
    from fedsim.api.reproduce.papers import find_tables, read_papers

    tables = (
        find_tables(name)
        if name is not None
        else [(paper, table) for paper in read_papers() for table in read_papers()[paper].table]
    )
    if scale is None:
        _list_tables(tables) if name is None else _show_kept(tables)
        return
    if scale not in ("quick", "full"):
        raise ConfigError(f"--scale: expected quick or full, got {scale!r}")
    _run(tables, scale, cells, quiet=quiet, verbose=verbose)  # type: ignore[arg-type]


def _list_tables(tables: Sequence[tuple[str, str]]) -> None:
    """Print every table with what is kept of it, what makes it again, and how long that takes."""
    from fedsim.api.reproduce.papers import count_verdicts, read_results
    from fedsim.api.reproduce.recipes import describe_reproduction

    names = ("table", "last result", "kept", "quick run", "reproduced by")
    printed = new_table(*(Column(name, no_wrap=name in names[:2]) for name in names), box=SIMPLE_HEAD)
    for paper, table in tables:
        kept = [result for result in read_results()[paper].kept if result.table == table]
        latest = str(max(result.date for result in kept)) if kept else "not measured"
        quick = [result for result in kept if result.name == "quick"]
        full = [result for result in kept if result not in quick]
        printed.add_row(
            f"{paper}/{table}",
            latest,
            count_verdicts(paper, full),
            count_verdicts(paper, quick),
            describe_reproduction(paper, table),
        )
    console.print(printed)
    console.print("fedsim reproduce TABLE shows its figures, with --scale quick or full runs it", markup=False)


def _show_kept(tables: Sequence[tuple[str, str]]) -> None:
    """Print what is kept of each table, compared with the paper."""
    from fedsim.api.reproduce.papers import commit_sentence, compare_figures, read_papers, read_results
    from fedsim.api.reproduce.recipes import describe_reproduction

    for paper, table in tables:
        published = read_papers()[paper].table[table]
        console.print(f"\n{paper}/{table}: {published.title}", style="bold", markup=False)
        label = "paper" if published.rows else "setting"
        console.print(f"{label}: {published.setting}", markup=False, highlight=False)
        if published.differs:
            console.print(f"differs: {published.differs.strip()}", markup=False, highlight=False)
        console.print(f"reproduced by: {describe_reproduction(paper, table)}", markup=False, highlight=False)
        for kept in read_results()[paper].kept:
            if kept.table == table:
                comparison = compare_figures(paper, table, kept.rows, f"kept: {paper}/{table}")
                _print_comparison(paper, table, f"{kept.name}, {kept.date}", comparison, kept.reasons)
                if kept.why_missed:
                    console.print(f"Missed: {kept.why_missed}.", markup=False, highlight=False)
                console.print(f"{kept.note.strip()}\n{kept.command.strip()}", markup=False, highlight=False)
                if sentence := commit_sentence([kept]):
                    console.print(sentence, markup=False, highlight=False)


def _run(
    tables: Sequence[tuple[str, str]], scale: ScaleName, cells: Path | None, *, quiet: bool, verbose: bool
) -> None:
    """Run the sweeps of these tables, one after another."""
    from fedsim.api.reproduce.recipes import SweepRecipe, find_recipe

    recipes: dict[tuple[str, str], SweepRecipe] = {}
    for paper_and_table in tables:
        table_recipe = find_recipe(*paper_and_table)
        if table_recipe is not None:
            recipes[paper_and_table] = table_recipe
    if not recipes:
        from fedsim.api.reproduce.running import require_recipe

        require_recipe(*tables[0])
    if without_recipe := [f"{paper}/{table}" for paper, table in tables if (paper, table) not in recipes]:
        names = ", ".join(without_recipe)
        console.print(f"Left out, because scripts make them: {names}.", markup=False, highlight=False)
    _print_durations(
        {f"{paper}/{table}, {scale}": sweep_recipe.scale(scale) for (paper, table), sweep_recipe in recipes.items()}
    )

    # What follows takes seconds to import, so a name that nobody published is reported before.
    from fedsim.api.reproduce.running import RESULT, reproduce_table
    from fedsim.cli.work_shown import show_work

    failures: list[str] = []
    for paper, table in recipes:
        with show_work(quiet, verbose):
            outcome = reproduce_table(paper, table, scale, cells)
        _print_comparison(paper, table, outcome.kept.name, outcome.comparisons, outcome.kept.reasons)
        console.print(
            f"{outcome.kept.note}\nkept: {outcome.folder / RESULT}", markup=False, highlight=False, soft_wrap=True
        )
        for sentence in outcome.left_out:
            console.print(f"does not apply: {sentence}", markup=False, highlight=False, soft_wrap=True)
        failures += outcome.failures
    finish(failures)


def _print_durations(scales: Mapping[str, Scale]) -> None:
    from fedsim.api.reproduce.recipes import duration_text

    for name, scale in scales.items():
        text = f"{name}: {scale.note} About {duration_text(scale.minutes)} on {scale.on}."
        console.print(text, markup=False, highlight=False)
    if len(scales) > 1:
        total = duration_text(sum(scale.minutes for scale in scales.values()))
        console.print(f"All together about {total}.", markup=False, highlight=False)


def _print_comparison(
    paper: str, table: str, title: str, comparisons: Sequence[FigureComparison], reasons: Mapping[str, str]
) -> None:
    """Print our figures and the paper's, with difference and verdict, or why an attack has none.

    Where the paper has no figures, each row is a line.
    """
    from fedsim.api.reproduce.papers import read_papers

    quantities = read_papers()[paper].table[table].quantities
    if not read_papers()[paper].table[table].rows:
        _print_lines({name: quantity.title for name, quantity in quantities.items()}, title, comparisons, reasons)
        return
    printed = new_table("", "paper", "ours", "difference", "verdict", box=SIMPLE_HEAD, title=escape(title))
    for row, row_comparisons in groupby(comparisons, key=lambda comparison: comparison.row):
        printed.add_row(f"[bold]{escape(row)}[/]")
        for comparison in row_comparisons:
            printed.add_row(f"  {escape(quantities[comparison.quantity].title)}", *_cells(comparison))
    console.print(printed)


def _print_lines(
    titles: Mapping[str, str], title: str, comparisons: Sequence[FigureComparison], reasons: Mapping[str, str]
) -> None:
    """Print a line of our figures for each row, and below it why the other rows have none."""
    texts: dict[str, dict[str, str]] = {}
    for comparison in comparisons:
        texts.setdefault(comparison.row, {})[comparison.quantity] = comparison.ours.text
    shown = [name for name in titles if any(name in row for row in texts.values())]
    printed = new_table("", *(escape(titles[name]) for name in shown), box=SIMPLE_HEAD, title=escape(title))
    for row, row_texts in texts.items():
        printed.add_row(escape(row), *(row_texts.get(name, "") for name in shown))
    console.print(printed)
    for row, reason in reasons.items():
        console.print(f"{row}: {reason}", markup=False, highlight=False, soft_wrap=True)


def _cells(comparison: FigureComparison) -> tuple[str, ...]:
    """Return the paper's figure, ours, the difference and the verdict; only ours where the paper has none."""
    from fedsim.api.reproduce.figures import difference_text

    paper, ours, verdict = comparison.paper, comparison.ours, comparison.verdict
    if paper is None or verdict is None:
        return "", ours.text, "", ""
    return paper.text, ours.text, difference_text(ours, paper), f"[{_colour_of(verdict)}]{verdict}[/]"


def _colour_of(verdict: FigureVerdict) -> str:
    """Return the colour in which a verdict is printed; mypy sees that none is left out."""
    from fedsim.api.reproduce.figures import FigureVerdict

    match verdict:
        case FigureVerdict.MET:
            return "green"
        case FigureVerdict.MISSED:
            return "red"
        case FigureVerdict.ABOVE:
            return "yellow"
        case FigureVerdict.NOT_COMPARABLE:
            return "dim"
