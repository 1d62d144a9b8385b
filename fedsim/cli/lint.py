"""Command `fedsim lint`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.options import DataDir, Overrides, Trust, console

if TYPE_CHECKING:
    from fedsim.pitfalls.pitfall import Pitfall


def lint(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment, attack or sweep file.")],
    overrides: Overrides = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 1 if there are pitfalls, or if they cannot be checked."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the pitfalls as JSON.")] = False,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Name the pitfalls of an evaluation before it is run, each with a counter-experiment to copy."""
    from fedsim.api.linting import lint_file
    from fedsim.federation.experiment_file import parse_override

    pitfalls = lint_file(file, [parse_override(override) for override in overrides or []], trust=trust)
    if as_json:
        rows = [dataclasses.asdict(pitfall) for pitfall in pitfalls]
        console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        _show_pitfalls(pitfalls)
    if strict and pitfalls:
        raise typer.Exit(1)


def _show_pitfalls(pitfalls: list[Pitfall]) -> None:
    if not pitfalls:
        console.print("no pitfalls found")
    for number, pitfall in enumerate(pitfalls, start=1):
        lines = [f"{number}. {pitfall.title}", f"   {pitfall.detail}", f"   {pitfall.reason}"]
        if pitfall.was_tried:
            counter = [f"       {line}".rstrip() for line in pitfall.counter_experiment.splitlines()]
            lines += ["   Counter-experiment:", "", *counter]
        lines.append("")
        console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)
