"""Command `fedsim run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.base.errors import ConfigError
from fedsim.cli.options import DataDir, Key, Overrides, Quiet, Trust, Verbose, finish_with_report


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An experiment file; with --app, an attack file.")
    ] = None,
    app: Annotated[
        Path | None,
        typer.Option("--app", metavar="FOLDER", help="Run the Flower app in this folder, in place of an experiment."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume an interrupted run.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the same folder.")] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Run a federation under a curious server, attack what it saw, and report."""
    from fedsim.federation.experiment_file import load_config, parse_override
    from fedsim.federation.open_run import OpenRun
    from fedsim.federation.run_folder import default_folder, read_exposures

    if app is not None:
        if resume is not None:
            raise ConfigError(
                "--resume continues the run of an experiment, and an app cannot be resumed; remove --resume"
            )
        _run_app(app, file, overrides or [], out, overwrite=overwrite, quiet=quiet, verbose=verbose, trust=trust)
        return
    if (file is None) == (resume is None):
        raise ConfigError("give either an experiment file or --resume RUN")
    if resume is not None and (overrides or out or overwrite):
        raise ConfigError("--resume continues the experiment without changes; leave out --set, --out and --overwrite")
    config = None if file is None else load_config(file, overrides or [], trust=trust)

    # What follows takes seconds to import, so a mistyped key is reported before.
    from fedsim.api import pipeline
    from fedsim.api.linting import log_pitfalls_of_file
    from fedsim.audit.evaluation.empirical_epsilon import read_epsilons
    from fedsim.cli.work_shown import show_answer, show_epsilons, show_exposure, show_scores, show_work

    with show_work(quiet, verbose) as follow:
        if config is not None and file is not None:
            folder = OpenRun(out or default_folder(file))
            log_pitfalls_of_file(file, [parse_override(override) for override in overrides or []], trust=trust)
            done = pipeline.run(config, folder, overwrite=overwrite, follow=follow)
        else:
            assert resume is not None
            done = pipeline.resume(OpenRun(resume), trust=trust, follow=follow)
    show_scores(done)
    show_epsilons(read_epsilons(done.folder))
    show_exposure(read_exposures(done.folder), "before sending, mean over rounds")
    show_answer(done)
    finish_with_report(done, quiet)


def _run_app(
    folder: Path,
    file: Path | None,
    overrides: list[str],
    out: Path | None,
    *,
    overwrite: bool,
    quiet: bool,
    verbose: bool,
    trust: bool,
) -> None:
    """Run a Flower app under a curious server, attack what it saw, and report."""
    from fedsim.api.app_runs import default_app_folder, read_request, run_request
    from fedsim.api.linting import log_pitfalls_of_file
    from fedsim.cli.work_shown import show_answer, show_scores, show_work
    from fedsim.federation.experiment_file import parse_override
    from fedsim.federation.open_run import OpenRun

    changes = [parse_override(override) for override in overrides]
    request = read_request(folder, file, changes, trust=trust)
    with show_work(quiet, verbose) as follow:
        if file is not None:
            log_pitfalls_of_file(file, changes, trust=trust)
        run_folder = OpenRun(out or default_app_folder(request.app))
        done = run_request(request, run_folder, overwrite=overwrite, trust=trust, follow=follow)
    show_scores(done)
    show_answer(done)
    finish_with_report(done, quiet)
