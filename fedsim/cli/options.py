"""Options that several commands have, and what each command says at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fedsim.workflow.work import Done

console = Console()
_LONGEST = 10_000
"""Letters of a sentence that are shown."""
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting, e.g. attack.sme.iterations=200.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The folder of data sets; FEDSIM_DATA by default.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the final table only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for each round and each client.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import code that a run folder names by module:callable; said each time.")
]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="Sign the run's manifest with this secret, or check that.")
]


def _the_run(path: Path) -> Path:
    """The run in a folder in which a Flower app records its runs; any other path itself."""
    if not path.is_dir() or (path / "experiment.toml").exists() or not any(path.glob("run-*")):
        return path
    from fedsim.recording.transcript import the_run  # which takes torch

    return the_run(path)


RunPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run folder, or one in which a Flower app records runs.", callback=_the_run),
]


def use_data_dir(folder: Path | None) -> None:
    """Have this process, and those it starts, look for data in `folder`."""
    if folder is not None:
        os.environ["FEDSIM_DATA"] = str(folder.resolve())


def use_key(file: Path | None) -> None:
    """Have this process, and those it starts on any engine, sign with the secret in `file`."""
    from fedsim.recording import seals

    if file is not None:
        os.environ[seals.KEY] = str(file.resolve())
    seals.key()  # says now if it cannot be used


def told_report(done: Done, quiet: bool = False) -> None:
    """Say where the report is, and end with what failed."""
    if not quiet:
        console.print(f"report: {done.folder.report}", soft_wrap=True, markup=False)
    finish(done.failures)


def finish(failures: Sequence[str]) -> None:
    """Say what failed and end with exit code 1; nothing where all is well."""
    for failure in failures:
        say(failure)
    if failures:
        raise typer.Exit(1)


def say(sentence: str) -> None:
    """One line on the standard error."""
    print(f"fedsim: {harmless(sentence)}", file=sys.stderr)  # noqa: T201


def harmless(text: str) -> str:
    """Return `text` without what a terminal would obey, and not too long, whatever a stranger's file had it quote."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}…"


def number_of(count: int, what: str) -> str:
    """`1 round`, or `3 rounds`."""
    return f"{count} {what}{'s' * (count != 1)}"


def rounds_named(numbers: Iterable[int]) -> str:
    """`round 3`, or `rounds 1, 3`."""
    chosen = sorted(set(numbers))
    return f"round{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"
