"""Command `fedsim expose`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from fedsim.base.errors import ConfigError, number_of
from fedsim.cli.options import DataDir, Key, Overrides, Quiet, Trust, Verbose, console, finish


def expose(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="An experiment file, or the folder of a run.")
    ],
    measures: Annotated[
        list[str] | None,
        typer.Option("--measure", help="Measures; by default those of the experiment; if it has none, all that apply."),
    ] = None,
    clients: Annotated[list[int] | None, typer.Option("--client", help="Clients; all by default.")] = None,
    rounds: Annotated[
        list[int] | None, typer.Option("--round", help="Recorded rounds of a run; the first one by default.")
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="States that \\[states] keeps, such as round-5, or files; by default the initial model.",
        ),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Measure each example, too.")] = False,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for table and pictures; runs/exposure-NAME or RUN/exposure.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier results there.")] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Measure which clients and examples are most exposed, without running an attack."""
    from fedsim.federation.experiment_file import load_config
    from fedsim.federation.open_run import OpenRun

    run, is_run = OpenRun(experiment), experiment.is_dir()
    measure_settings = [text for text in overrides or [] if text.startswith("measure.")]
    other_settings = [text for text in overrides or [] if text not in measure_settings]
    if rounds and not is_run:
        raise ConfigError(f"--round: {experiment} is not a run and has no recorded rounds; use --state")
    if other_settings and is_run:
        raise ConfigError(
            f"--set {other_settings[0]}: the settings of a run cannot change; only settings of measures can"
        )
    config = run.read_experiment(trust=trust) if is_run else load_config(experiment, other_settings, trust=trust)
    if config is None:
        raise ConfigError(
            f"{experiment}: has no experiment file, so its clients' data are unknown; name a run of fedsim"
        )

    # What follows takes seconds to import, so a mistyped key is reported before.
    from fedsim.api.exposing import check_free, write_exposure
    from fedsim.cli.work_shown import show_exposure, show_work
    from fedsim.exposure.of_clients import failure_sentences
    from fedsim.federation.algorithm_checks import check_trains_plainly
    from fedsim.federation.build_plugins import build_measure
    from fedsim.federation.experiment import Experiment
    from fedsim.federation.exposure_moments import choose_measures, file_moments, find_applicable_measures, run_moments
    from fedsim.federation.resolve import resolve

    # Measure into the folder.
    folder = out or (experiment / "exposure" if is_run else Path("runs") / f"exposure-{experiment.stem}")
    check_free(folder, overwrite=overwrite)
    is_in_run = is_run and out is None
    if is_in_run:
        run.check_key()
    built_experiment = Experiment(resolve(config))
    check_trains_plainly(built_experiment, "expose")
    named_schedules = [build_measure(table) for table in choose_measures(config, measures or [], measure_settings)]
    with show_work(quiet, verbose), run.hold_lock() if is_in_run else contextlib.nullcontext():
        chosen_schedules = [replace(schedule, per_example=schedule.per_example or each) for schedule in named_schedules]
        schedules = chosen_schedules or find_applicable_measures(built_experiment, each=each)
        if is_run:
            moments = run_moments(built_experiment, run, states or [], rounds or [], clients or [])
        else:
            moments = file_moments(built_experiment, experiment.stem, states or [], clients or [])
        rows, pictures = write_exposure(folder, built_experiment, moments, schedules)
        if is_in_run:
            run.manifest.note(folder / "exposure.csv")
    # Show the results.
    for state, state_rows in groupby(rows, key=lambda row: row["state"]):
        show_exposure(list(state_rows), f"at {state}")
    console.print(f"table: {folder / 'exposure.csv'} ({number_of(len(rows), 'row')})", soft_wrap=True, markup=False)
    for picture in pictures:
        console.print(f"picture: {picture}", soft_wrap=True, markup=False)
    finish(failure_sentences(rows))
