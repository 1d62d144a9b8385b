"""Command `fedsim new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.options import console
from fedsim.skeletons.new import KINDS, PluginTemplate


def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(KINDS), autocompletion=lambda: list(KINDS))],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it, such as my-attack.")],
    inversion: Annotated[
        bool, typer.Option("--inversion", help="An attack composed of the parts of fedsim.inversion.")
    ] = False,
) -> None:
    """Write a commented skeleton that runs as it is: an experiment, or a plug-in with an experiment to try it in."""
    skeleton = PluginTemplate(kind, name, inversion)
    written = skeleton.write(Path())
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False, highlight=False)
    if skeleton.installation:
        console.print(f"first:   {skeleton.installation}", soft_wrap=True, markup=False, highlight=False)
    for command in skeleton.commands:
        console.print(f"try it:  fedsim {command}", soft_wrap=True, markup=False, highlight=False)
