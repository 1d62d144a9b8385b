"""Options that several commands share, and what each command prints at its end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table

if TYPE_CHECKING:
    from fedsim.api.pipeline import AuditResult


class _Screen(Console):
    """Console whose terminal obeys no control character of a text, which may be a stranger's."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """See Console."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(blank_control_characters(segment.text), segment.style)


class Sentence(logging.Formatter):
    """Format a record as a line for the screen; a traceback is for the file alone."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the sentence alone."""
        return strip_control_characters(record.getMessage())


console = _Screen(emoji=False)  # `mine:A: failed` names a class, not the letter A in a box
_MAX_LETTERS = 10_000
"""Most letters of a sentence that are shown."""
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting, e.g. attack.sme.iterations=200.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the final table only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for each round and each client.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import code that a run folder names by module:callable.")]


def _find_run(path: Path) -> Path:
    """Return the run in a folder in which a Flower app records its runs; any other path itself."""
    if not path.is_dir() or (path / "experiment.toml").exists() or not any(path.glob("run-*")):
        return path
    from fedsim.recording.recording_folder import find_run

    return find_run(path)


RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run folder, or a folder with the recordings of a Flower app.", callback=_find_run
    ),
]


def _use_data_dir(folder: Path | None) -> Path | None:
    """Make this process, and those it starts, look for data in `folder`."""
    if folder is not None:
        os.environ["FEDSIM_DATA"] = str(folder.resolve())
    return folder


def _use_key(file: Path | None) -> Path | None:
    """Make this process, and those it starts on any engine, sign with the secret in `file`."""
    from fedsim.recording import seals

    if file is not None:
        os.environ[seals.KEY_VARIABLE] = str(file.resolve())
    seals.signing_key()  # raises now if it cannot be used
    return file


# What these two say is done before the command begins, which need not read them.
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="The folder of data sets; FEDSIM_DATA by default.", callback=_use_data_dir),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="Sign or verify the run's manifest with the secret in this file.",
        callback=_use_key,
    ),
]


def finish_with_report(done: AuditResult, quiet: bool = False) -> None:
    """Print where the report is, and end with what failed."""
    if not quiet:
        console.print(f"report: {done.folder.report}", soft_wrap=True, markup=False)
    finish(done.failures)


def finish(failures: Sequence[str]) -> None:
    """Print what failed and end with exit code 1; do nothing where all is well."""
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)


def print_error(sentence: str) -> None:
    """Print one line on the standard error."""
    print(f"fedsim: {strip_control_characters(sentence)}", file=sys.stderr)  # noqa: T201


def strip_control_characters(text: str) -> str:
    """Return `text` without control characters that a terminal would obey, cut to 10,000 letters.

    A stranger's file may have it quoted.
    """
    shown = blank_control_characters(text[:_MAX_LETTERS])
    return shown if len(text) <= _MAX_LETTERS else f"{shown}…"


def blank_control_characters(text: str) -> str:
    r"""Return `text` with a blank in place of each character that a terminal would obey, or that turns its direction.

    >>> blank_control_characters("loss\x1b[2J\u202e of\nclient 3")
    'loss [2J  of\nclient 3'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def new_table(*columns: str | Column, **settings: Any) -> Table:
    """Return a table that goes on in the next line where a word is too long, which rich would cut off."""
    table = Table(*columns, **settings)
    for column in table.columns:
        column.overflow = column.overflow if column.no_wrap else "fold"
    return table
