"""Command `fedsim index`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedsim.base.errors import format_percent, number_of
from fedsim.cli.options import console, new_table, strip_control_characters

if TYPE_CHECKING:
    from fedsim.report.index_entry import IndexEntry
    from fedsim.report.run_index import RunIndex

_MAX_ROWS = 20
"""Most runs that the terminal lists; the page has all."""
_MAX_LETTERS = 60
"""Most letters of a sentence that stands in place of a verdict; the page has all."""


def index(
    folder: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of run folders.")],
) -> None:
    """Write index.html, a table of all runs and sweeps in a folder: settings, state, and what leaked."""
    from fedsim.report.run_index import index_folder, write_index_page

    found = index_folder(folder)
    page = write_index_page(found)
    console.print(_entry_table(found))
    if len(found.entries) > _MAX_ROWS:
        console.print(f"and {len(found.entries) - _MAX_ROWS} more")
    if found.num_skipped:
        verb = "holds" if found.num_skipped == 1 else "hold"
        console.print(f"left out: {number_of(found.num_skipped, 'folder')} that {verb} no run")
    console.print(f"page: {page}", soft_wrap=True, markup=False)


def _entry_table(found: RunIndex) -> Table:
    """Return the newest runs as a table for the terminal."""
    columns = ("run", "verdict", "accuracy", "state")
    table = new_table(*(Column(name) for name in columns), box=SIMPLE_HEAD)
    for entry in found.entries[:_MAX_ROWS]:
        cells = (entry.name, entry.verdict or _abridge(entry.sentence), _accuracy_text(entry), entry.shown_state)
        table.add_row(*(escape(strip_control_characters(cell)) for cell in cells))
    return table


def _abridge(sentence: str) -> str:
    """Return the first words of a long sentence."""
    return sentence if len(sentence) <= _MAX_LETTERS else f"{sentence[:_MAX_LETTERS].rpartition(' ')[0]} ..."


def _accuracy_text(entry: IndexEntry) -> str:
    if math.isnan(entry.accuracy):
        return ""
    return format_percent(entry.accuracy) + (" at best" if entry.kind == "sweep" else "")
