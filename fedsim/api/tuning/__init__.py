"""Choose settings of attacks by trials on simulated clients of public data: `fedsim.tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsim.api.arguments import copy_tables
from fedsim.api.objects import replace_objects
from fedsim.api.runs import follow_with
from fedsim.api.tuning.simulated_clients import simulated_experiment
from fedsim.api.tuning.trials import SettingTrial, SimulatedTrials, TunedAttack, explain_refusal
from fedsim.audit.plan import ReportJobProgress
from fedsim.base.errors import ConfigError, RunError, number_of
from fedsim.base.files import write_text
from fedsim.base.progress import ProgressListener, listen_to_progress
from fedsim.base.randomness import serialize_calls
from fedsim.federation.adversary_tables import AttackTable, is_stated
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import config_of, load_config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import default_folder
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.metric import describe_metric
from fedsim.recording.recording_folder import find_run
from fedsim.recording.wire_format import State

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second

CLIENTS, ITERATIONS = 2, 200
"""Number of simulated clients, and most iterations of a trial."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings that `fedsim.tune` chose.

    Attributes:
        path: the attack file that it wrote.
        attacks: the attacks with their settings and trials.
        folder: the run of the simulated clients, with all trials.
    """

    path: Path
    attacks: Sequence[TunedAttack] = field(repr=False)
    folder: Path = field(repr=False)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return by attack the settings that were changed."""
        changes = {}
        for tuned in self.attacks:
            changes[tuned.table.title] = dict(tuned.best_trial.changes)
        return changes

    @property
    def trials(self) -> pd.DataFrame:
        """Return a row for each attack and setting that was tried, with its mean scores."""
        import pandas as pd

        rows = []
        for tuned in self.attacks:
            for trial in tuned.trials:
                values = {
                    "iterations": trial.iterations,
                    "score": trial.score,
                    "objective": trial.objective,
                    "l_sim": trial.l_sim,
                }
                about = {"attack": tuned.table.title, "metric": trial.metric, "chosen": trial is tuned.best_trial}
                rows.append({**about, **values, **trial.changes})
        return pd.DataFrame(rows)


@serialize_calls
def tune(
    experiment: str | Path | Mapping[str, Any] | Config,
    out: str | Path | None = None,
    *,
    attack: str | None = None,
    clients: int = CLIENTS,
    iterations: int = ITERATIONS,
    trust: bool = False,
    progress: ProgressListener | None = None,
) -> Tuning:
    """Choose the step size of attacks, its sign and the weight of the prior, without the victims' data.

    Clients are simulated: they hold public examples of the data set, and train once from the weights that the victim is
    sent, with its settings and defenses. Each setting is tried on them, and the one that reconstructs the public
    examples best is written into an attack file.

    Args:
        experiment: an experiment file, its tables as a dict, a `Config`, or a run folder.
        out: the attack file; `NAME-tuned.toml` by default for `NAME.toml` or the run `NAME`.
        attack: title of one attack of the experiment, or the name of another; by default all of the experiment that
            have a step size.
        clients: number of simulated clients, at most.
        iterations: of each trial, at most; step sizes fall at the same fractions of them as in the attack.
        trust: import code that a run folder names.
        progress: called as `progress(what, done, total)`.

    Raises:
        FedsimError: there are no public examples, or nothing to tune, or all trials of an attack failed; what was
            tried is kept, and the same call goes on from there.
    """
    run, name = None, ""
    if isinstance(experiment, Config):
        config = experiment
    elif isinstance(experiment, Mapping):
        tables = {str(key): copy_tables(value) for key, value in experiment.items()}
        replace_objects(tables)
        config = config_of(tables, "experiment", Path.cwd())
    else:
        config, run, name = read_experiment(Path(experiment), trust=trust)
    if out is None and not name:
        raise ConfigError("out: an experiment that is in no file has no name; name the attack file")
    path = Path(f"{name}-tuned.toml") if out is None else Path(out)
    with listen_to_progress(progress):
        return tune_attacks(
            config, run, path, attack=attack, clients=clients, iterations=iterations, follow=follow_with(progress)
        )


def read_experiment(path: Path, *, trust: bool) -> tuple[Config, OpenRun | None, str]:
    """Return the experiment in a file or a run folder, the run if it is one, and its name."""
    if not path.is_dir():
        return load_config(path, trust=trust), None, path.stem
    run = OpenRun(find_run(path))
    config = run.read_experiment(trust=trust)
    if config is None:
        raise ConfigError(
            f"{path}: was recorded elsewhere, so there are no public examples to simulate clients with; tune an "
            "experiment with such data and this model, and give its attack file to `fedsim attack`"
        )
    return config, run, run.path.resolve().name


def _make_folder(folder: Path, file: Path) -> None:
    """Make the folder of the trials beside the attack file, before hours are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror}); choose another --out") from error


def tune_attacks(
    config: Config,
    run: OpenRun | None,
    path: Path,
    *,
    attack: str | None,
    clients: int,
    iterations: int,
    follow: ReportJobProgress | None,
) -> Tuning:
    """Tune the attacks of an experiment, or of its run, and write the attack file; see `tune`."""
    for name, count in (("clients", clients), ("iterations", iterations)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"tune: {name}: expected a whole number of at least 1, got {count!r}")
    config = resolve(config.without_data_hash())
    tunable = _choose_attacks(config, attack)
    # Train the simulated clients, unless that is done.
    broadcast, victim, start = _find_start(config, run)
    folder = path.parent / default_folder(path)
    _make_folder(folder, path)
    simulated = simulated_experiment(config, broadcast, victim, clients, folder)
    trial_run = OpenRun(folder / "trials")
    is_there = trial_run.experiment.is_file()
    differs = is_there and trial_run.find_changed_setting(simulated) is not None
    run_federation(simulated, trial_run, resume=is_there and not differs, overwrite=differs)
    # Try settings on them.
    actual = simulated.federation.clients
    examples = len(simulated.data.settings["indices"]) // actual
    results = []
    for position, (table, built) in enumerate(tunable):
        trials = SimulatedTrials(trial_run, simulated, position, table, built, iterations, follow)
        tuned = trials.tune()
        note = (
            f"{len(tuned.trials)} trials on {number_of(actual, 'simulated client')} of "
            f"{number_of(examples, 'public example')} of '{config.data.name}' each, trained from {start}; the best by "
            f"{tuned.best_trial.metric} of these examples"
        )
        results.append(replace(tuned, table=tuned.table.model_copy(update={"tuned": note})))
    write_tuned_file(path, config, results)
    return Tuning(path=path, attacks=results, folder=trial_run.path)


def _choose_attacks(config: Config, name: str | None) -> list[tuple[AttackTable, Attack]]:
    """Return the attacks to tune: those of the experiment, or the one that is named."""
    pairs = build_attacks(config)
    if name is not None:
        named = [(table, attack) for table, attack in pairs if table.title == name]
        pairs = named or build_attacks(validate_tables(AttackFile, {"attack": [{"name": name}]}, "tune"))
    if not pairs:
        raise ConfigError("tune: the experiment names no attack; name one with --attack")
    reasons = {table.title: explain_refusal(table.title, attack) for table, attack in pairs}
    tunable = [(table, attack) for table, attack in pairs if not reasons[table.title]]
    if not tunable:
        raise ConfigError(f"tune: {next(iter(reasons.values()))}; name another attack with --attack")
    return tunable


def _find_start(config: Config, run: OpenRun | None) -> tuple[State | None, int, str]:
    """Return w_t (None: the first weights), the victim whose training is simulated, and how w_t is called."""
    victims, rounds = config.adversary.victims, config.adversary.rounds
    if run is None:
        return None, victims[0] if isinstance(victims, list) and victims else 0, "the first weights"
    transcript = run.recording
    number = rounds[0] if isinstance(rounds, list) and rounds else transcript.rounds[0]
    present = transcript.clients(number)
    if not present:
        raise ConfigError(f"{run.path}: no client is recorded in round {number}; attack another (adversary.rounds)")
    victim = victims[0] if isinstance(victims, list) and victims[0] in present else present[0]
    return transcript.update(number, victim).before, victim, f"the weights of round {number}"


def write_tuned_file(path: Path, config: Config, attacks: Sequence[TunedAttack]) -> None:
    """Write the attack file: the experiment's adversary, and the attacks with their trials in comments."""
    adversary = config.adversary.model_dump(mode="json", exclude_defaults=True, exclude={"knowledge"})
    knowledge = config.adversary.knowledge.model_dump(mode="json")
    if knowledge := {name: value for name, value in knowledge.items() if is_stated(name, value)}:
        adversary["knowledge"] = knowledge
    parts = ["# Written by `fedsim tune`. No data of the victims were used: `tuned` says what was.\n"]
    if adversary:
        parts.append(tomli_w.dumps({"adversary": adversary}))
    for tuned in attacks:
        table = {name: value for name, value in tuned.table.model_dump(exclude_none=True).items() if value != ""}
        parts.append(_trial_comment(tuned) + tomli_w.dumps({"attack": [table]}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(parts))


def _trial_comment(tuned: TunedAttack) -> str:
    """Return the trials as lines of a comment, best first."""
    label = describe_metric(tuned.best_trial.metric).label
    lines = [f"# {tuned.table.title}: {label} of the public examples in each trial"]
    for trial in sort_trials(tuned.trials):
        distance = "" if math.isnan(trial.l_sim) else f", L_sim {trial.l_sim:.2g}"
        lines.append(f"#   {trial.iterations} iterations, {trial.score:.4g}{distance}: {describe_changes(trial)}")
    return "\n".join(lines) + "\n"


def sort_trials(trials: Sequence[SettingTrial]) -> list[SettingTrial]:
    """Return the trials, the chosen one first: longer ones before shorter ones, then by their scores."""
    return sorted(trials, key=lambda trial: (-trial.iterations, -trial.rank))


def describe_changes(trial: SettingTrial) -> str:
    """Return the changed settings as a TOML file has them.

    >>> describe_changes(SettingTrial(iterations=200, changes={"step_size": 0.1, "signed": True}))
    'step_size = 0.1, signed = true'
    """
    settings = [f"{name} = {str(value).lower()}" for name, value in trial.changes.items()]
    return ", ".join(settings) or "as in the experiment"
