"""Command `fedsim attack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.options import DataDir, Key, Overrides, Quiet, RunPath, Trust, Verbose, finish_with_report


def attack(
    run: RunPath,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An attack file; the run's own by default.")
    ] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Attack a recorded run, or the recording of a Flower app."""
    from fedsim.api.adversaries import read_adversary
    from fedsim.federation.open_run import OpenRun

    folder = OpenRun(run)
    adversary = read_adversary(folder, file, overrides or [], trust=trust)

    # What follows takes seconds to import, so a mistyped key is reported before.
    from fedsim.api import pipeline
    from fedsim.cli.work_shown import show_answer, show_scores, show_work

    with show_work(quiet, verbose) as follow:
        done = pipeline.attack(folder, adversary, trust=trust, follow=follow)
    show_scores(done)
    show_answer(done)
    finish_with_report(done, quiet)
