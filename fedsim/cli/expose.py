"""`fedsim expose`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.options import (
    DataDir,
    Key,
    Overrides,
    Quiet,
    Trust,
    Verbose,
    console,
    finish,
    number_of,
    use_data_dir,
    use_key,
)
from fedsim.errors import ConfigError


def expose(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="An experiment file, or the folder of a run.")
    ],
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measure", help="Measures; by default those of the experiment, and where it has none, all that apply."
        ),
    ] = None,
    clients: Annotated[list[int] | None, typer.Option("--client", help="Clients; all by default.")] = None,
    rounds: Annotated[
        list[int] | None, typer.Option("--round", help="Recorded rounds of a run; the first one by default.")
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="States that \\[states] keeps, such as round-5, or files; by default what training starts from.",
        ),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Measure each example, too.")] = False,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for table and pictures; runs/exposure-NAME or RUN/exposure.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier one left there.")] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Say which clients and examples are exposed most by what clients send, without any attack."""
    from fedsim.experiments.reading import load_config
    from fedsim.experiments.run_folder import RunFolder

    use_data_dir(data_dir)
    use_key(key)
    is_run, own = experiment.is_dir(), [text for text in overrides or [] if text.startswith("measure.")]
    others = [text for text in overrides or [] if text not in own]
    if rounds and not is_run:
        raise ConfigError(f"--round: {experiment} is no run, so no round of it is recorded; name a --state")
    if others and is_run:
        raise ConfigError(f"--set {others[0]}: a run stays as it was made; only settings of measures may be changed")
    config = (
        RunFolder(experiment).read_experiment(trust=trust) if is_run else load_config(experiment, others, trust=trust)
    )
    if config is None:
        raise ConfigError(
            f"{experiment}: holds no experiment, so nobody here knows its clients' data; name a run of fedsim"
        )

    # What follows takes seconds to import, so a mistyped key is told of before.
    from fedsim.cli.work_shown import show_exposure, shown
    from fedsim.experiments.build import Experiment, a_gauge, resolve
    from fedsim.experiments.exposing import all_that_apply, chosen_tables, moments_of_file, moments_of_run
    from fedsim.exposure.of_clients import failures
    from fedsim.workflow.exposing import check_free, exposed_to

    folder = out or (experiment / "exposure" if is_run else Path("runs") / f"exposure-{experiment.stem}")
    check_free(folder, overwrite=overwrite)
    within = is_run and out is None
    if within:
        RunFolder(experiment).check_key()
    made = Experiment(resolve(config))
    chosen = [a_gauge(table) for table in chosen_tables(config, measures or [], own)]
    with shown(quiet, verbose), RunFolder(experiment).held() if within else contextlib.nullcontext():
        asked = [replace(gauge, each=gauge.each or each) for gauge in chosen]
        gauges = asked or all_that_apply(made, each=each)
        if is_run:
            moments = moments_of_run(made, experiment, states or [], rounds or [], clients or [])
        else:
            moments = moments_of_file(made, experiment.stem, states or [], clients or [])
        rows, pictures = exposed_to(folder, made, moments, gauges)
        if within:
            RunFolder(experiment).note(folder / "exposure.csv")
    for state, of_it in groupby(rows, key=lambda row: row["state"]):
        show_exposure(list(of_it), f"at {state}")
    console.print(f"table: {folder / 'exposure.csv'} ({number_of(len(rows), 'row')})", soft_wrap=True, markup=False)
    for picture in pictures:
        console.print(f"picture: {picture}", soft_wrap=True, markup=False)
    finish(failures(rows))
