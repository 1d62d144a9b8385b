"""Command `fedsim tune`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.cli.options import DataDir, Quiet, Trust, Verbose, console, new_table

if TYPE_CHECKING:
    from fedsim.api.tuning.trials import TunedAttack


def tune(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT|RUN", help="An experiment file or a run folder.")],
    attack: Annotated[
        str | None, typer.Option(help="One attack; by default all of the experiment that have a step size.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The attack file; NAME-tuned.toml by default.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Maximum number of simulated clients.")] = 2,
    iterations: Annotated[int, typer.Option(min=1, help="Maximum number of iterations of a trial.")] = 200,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
) -> None:
    """Tune settings of attacks on simulated clients with public data, and write an attack file."""
    from fedsim.api.tuning import read_experiment, tune_attacks
    from fedsim.cli.work_shown import show_work

    config, run, name = read_experiment(experiment, trust=trust)
    path = out or Path(f"{name}-tuned.toml")
    with show_work(quiet, verbose) as follow:
        tuning = tune_attacks(config, run, path, attack=attack, clients=clients, iterations=iterations, follow=follow)
    for tuned in tuning.attacks:
        console.print(_trial_table(tuned))
    console.print(f"attack file: {path}", soft_wrap=True, markup=False)


def _trial_table(tuned: TunedAttack) -> Table:
    """Return a table of the trials of one attack, the chosen one first."""
    from fedsim.api.tuning import describe_changes, sort_trials
    from fedsim.interfaces.metric import describe_metric

    label = describe_metric(tuned.best_trial.metric).label
    table = new_table("settings", "iterations", label, "L_sim", title=escape(f"Trials of {tuned.table.title}"))
    for trial in sort_trials(tuned.trials):
        style = "bold" if trial is tuned.best_trial else "default"
        values = ["failed" if math.isnan(trial.score) else f"{trial.score:.4g}"]
        values.append("" if math.isnan(trial.l_sim) else f"{trial.l_sim:.2g}")
        table.add_row(escape(describe_changes(trial)), str(trial.iterations), *values, style=style)
    return table
