"""Command `fedsim train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.options import DataDir, Overrides, Quiet, Trust, Verbose, console, new_table


def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file with a \\[states] table.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the states; one in the cache by default.")] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
) -> None:
    r"""Train without an adversary, and save the models at the rounds and epochs in \[states]."""
    from fedsim.federation.experiment_file import load_config

    config = load_config(file, overrides or [], trust=trust)

    from fedsim.cli.work_shown import show_work
    from fedsim.federation.training_states import make_states

    with show_work(quiet, verbose):
        states = make_states(config, file.stem, out)
    table = new_table("state", "test loss", "test accuracy")
    for name, about in states.manifest()["states"].items():
        table.add_row(name, *(f"{about[key]:.3f}" if key in about else "-" for key in ("loss", "accuracy")))
    console.print(table)
    print(f'start from one with\n[model]\nstart = "{states.path(name)}"')  # noqa: T201
