"""What to do next: commands that follow from a verdict, for the terminal, a report and the page of a sweep."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsim.base.errors import FedsimError
from fedsim.federation.config import Config
from fedsim.federation.federation_tables import TrainingTable
from fedsim.interfaces.metric import describe_metric, find_metric
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import find_references
from fedsim.report.adaptive import HOLDS, NOT_CONCLUDED
from fedsim.report.headline import largest_victim_count, reported_readings
from fedsim.report.learning import NoLearning
from fedsim.report.summary import Summary, enumerate_words
from fedsim.report.sweep_answer import SweepAnswer
from fedsim.report.verdicts import BEYOND, LEAKS, MIN_VICTIMS, NOT_BEYOND, UNDECIDED, ScoreReading

RUN, SWEEP = "RUN", "SWEEP"
"""Names of the folder in the commands of a page, which may have been moved."""
CERTAINTY = (
    "If messages revealed nothing, each single claim of a leak (one attack, one metric) would be made in at most 5 % "
    "of cases; a false claim among several is more likely."
)
"""How sure the verdict `leaks` is."""
_KNOW_DEFENSES = "adversary.knowledge.defenses=true"
_ALL_VICTIMS = "'adversary.victims=\"all\"'"
_EXAMPLE_DEFENSE = "'defense=[{name=\"update-noise\", clip=0.5, noise_multiplier=0.05}]'"
"""Defense to begin with: any model and data take it."""
_MORE_SEEDS = 3
"""How many seeds are added where there are too few."""
_TIMES_LONGER = 5
"""How many times as many rounds a model gets that has not learnt."""
_TIMES_STEP = 10
"""By what the size of steps is changed where it is on the right side of the default already."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """What to do next.

    Attributes:
        aim: what for, as the beginning of a sentence.
        command: as a shell takes it.
    """

    aim: str
    command: str

    @property
    def text(self) -> str:
        """Return both, as a line of a terminal."""
        return f"{self.aim}: {self.command}"


_ATTACKS_THAT_ADAPT = NextStep(
    aim="Add attacks that use the defenses, which are granted and which none of these uses, and run it again",
    command="fedsim list attacks",
)


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """What the next steps after an audit depend on.

    Attributes:
        config: of the run; None where it was recorded elsewhere.
        num_recorded: how many clients, or groups of them, were recorded.
        folder: the run, as commands name it.
        command: that made the attacks, with `RUN` in place of the folder.
        party: which attacked, of `AdversaryRole`; an attack file may name another than the experiment.
    """

    readings: Sequence[ScoreReading]
    config: Config | None
    num_recorded: int
    has_failures: bool
    no_learning: NoLearning
    folder: str = RUN
    command: str = f"fedsim attack {RUN}"
    party: str = "server"

    @property
    def can_tune(self) -> bool:
        """Return whether `fedsim tune` finds settings: for attacks of an experiment that claim examples by descent."""
        summaries = [reading.summary for reading in self.readings]
        titles = {summary.attack_key[0] for summary in summaries if find_metric(summary.metric).of_examples}
        tables = self.config.attack if self.config else ()
        return any(table.title in titles and _has_step_size(table.name) for table in tables)

    @property
    def sees_one_sum(self) -> bool:
        """Return whether all clients of a round are one victim, however many there are."""
        if self.config is None:
            return False
        secure = self.config.secure_aggregation
        if self.party == "server":
            return secure is not None and secure.groups == "all"
        return secure is not None or self.party in ("outsider", "clients")

    @property
    def attack_command(self) -> str:
        """Return the command that attacks the recording again."""
        return self.command.replace(RUN, shlex.quote(self.folder), 1)

    def repeat_command(self, suffix: str, changes: Sequence[str], adversary_changes: Sequence[str] = ()) -> str:
        """Return the command that makes the run and its attacks again, in a folder beside this one.

        Args:
            suffix: of the folder.
            changes: settings of the federation that are changed.
            adversary_changes: settings of the adversary, of an attack file where one made the attacks.
        """
        copy = self.name_copy(suffix)
        has_file = self.command != f"fedsim attack {RUN}"
        options = "".join(f" --set {change}" for change in [*changes, *([] if has_file else adversary_changes)])
        command = f"fedsim run {shlex.quote(f'{self.folder}/experiment.toml')}{options} --out {copy}"
        if not has_file:
            return command
        options = "".join(f" --set {change}" for change in adversary_changes)
        return f"{command} && {self.command.replace(RUN, copy, 1)}{options}"

    def name_copy(self, suffix: str) -> str:
        """Return the folder of a further run beside this one."""
        return shlex.quote(f"{self.folder}-{suffix}")


def _has_step_size(plugin: str) -> bool:
    """Return whether an attack has settings that can be tuned; code that a file names is not run to find out."""
    if ":" in plugin:
        return False
    try:
        attack = registry.load("attacks", plugin)
    except FedsimError:
        return False
    return hasattr(attack, "step_size") and hasattr(attack, "iterations") and attack.reads_one_round()


def _change_training(config: Config, no_learning: NoLearning) -> str:
    """Return the setting to change so that the model learns; empty where it has learnt."""
    default = float(TrainingTable.model_fields["learning_rate"].default)
    rate = config.training.learning_rate
    match no_learning.remedy:
        case "train longer":
            return f"federation.rounds={_TIMES_LONGER * config.federation.rounds}"
        case "smaller steps":
            return f"training.learning_rate={min(default, rate / _TIMES_STEP):g}"
        case "larger steps":
            return f"training.learning_rate={max(default, rate * _TIMES_STEP):g}"
    return ""


def suggest_after_audit(run: AuditedRun) -> list[NextStep]:
    """Return what to do after attacks: a defense where something leaks, more where nothing is concluded.

    A run whose experiment names code, which its folder alone may not have run, is named with `--trust`.
    """
    steps = _choose_steps(run)
    if run.config is None or not any(find_references(run.config.model_dump(exclude={"federation": {"address"}}))):
        return steps
    to_trust = re.compile("fedsim (run|attack|tune|dossier) ")
    return [replace(step, command=to_trust.sub(r"fedsim \1 --trust ", step.command)) for step in steps]


def _choose_steps(run: AuditedRun) -> list[NextStep]:
    """Return the steps by the verdicts."""
    verdicts = set[str]()
    for readings in reported_readings(run.readings).values():
        verdicts |= {reading.verdict for reading in readings if not reading.baseline}
    if not verdicts:
        return _steps_to_scores(run)
    steps = []
    if run.config is not None and (changes := _change_training(run.config, run.no_learning)):
        steps.append(NextStep(aim="Train until the model learns", command=run.repeat_command("longer", [changes])))
    if LEAKS in verdicts:
        return steps + _steps_to_defense(run)
    if verdicts & {UNDECIDED, BEYOND, NOT_BEYOND}:
        return steps + _steps_to_conclusion(run)
    return steps + _steps_to_trust(run)


def _steps_to_scores(run: AuditedRun) -> list[NextStep]:
    """Return what to do where no attack has a verdict."""
    if run.has_failures:
        aim = "Fix what made the attacks fail (see log.txt), then"
        return [NextStep(aim=aim, command=run.attack_command)]
    if run.config is not None:
        return [NextStep(aim="Find out why the attacks have no verdict", command=f"fedsim inspect {run.folder}")]
    aim = "Name the clients' data in [truth], under the ids that fedsim inspect prints, then"
    return [NextStep(aim=aim, command=run.attack_command)]


def _steps_to_defense(run: AuditedRun) -> list[NextStep]:
    """Return what to do about a leak."""
    dossier = NextStep(aim="Document the leak in a dossier", command=f"fedsim dossier {shlex.quote(run.folder)}")
    if run.config is None:
        aim = "Let clients defend themselves with one of these (docs/how-to/choose-a-defense.md), record, attack again"
        return [NextStep(aim=aim, command="fedsim list defenses"), dossier]
    if run.config.defense or run.config.secure_aggregation:
        aim = "The clients' defense does not stop the attack; choose a stronger setting or another defense"
        return [NextStep(aim=aim, command="fedsim list defenses"), dossier]
    command = run.repeat_command("defended", [_EXAMPLE_DEFENSE], [_KNOW_DEFENSES])
    return [
        NextStep(aim="Try a defense (fedsim list defenses lists others)", command=command),
        NextStep(
            aim="Then compare leakage and accuracy",
            command=f"fedsim compare {shlex.quote(run.folder)} {run.name_copy('defended')}",
        ),
    ]


def _steps_to_conclusion(run: AuditedRun) -> list[NextStep]:
    """Return what to do where nothing is concluded."""
    reported = itertools.chain.from_iterable(reported_readings(run.readings).values())
    if all(_is_in_doubt(reading.summary) for reading in reported if not reading.baseline):
        return [NextStep(aim="Do what the doubts in scores.csv ask for, then", command=run.attack_command)]
    most = largest_victim_count(run.readings)
    steps = []
    if run.config is not None and run.sees_one_sum:
        seed = run.config.federation.seed + 1
        command = run.repeat_command(f"seed-{seed}", [f"federation.seed={seed}"])
        aim = "Run another federation, as all clients of one are seen as one sum (docs/how-to/run-a-sweep.md runs many)"
        steps.append(NextStep(aim=aim, command=command))
    elif most < run.num_recorded:
        command = f"{run.attack_command} --set {_ALL_VICTIMS}"
        steps.append(NextStep(aim="Attack all recorded clients", command=command))
    elif run.config is not None and (most < MIN_VICTIMS or not run.can_tune):
        num_clients = 2 * max(MIN_VICTIMS, run.num_recorded)
        command = run.repeat_command("larger", [f"federation.clients={num_clients}"], [_ALL_VICTIMS])
        steps.append(NextStep(aim="Record and attack more clients", command=command))
    elif most < MIN_VICTIMS:
        steps.append(NextStep(aim=f"Record at least {MIN_VICTIMS} clients, then", command=run.attack_command))
    if run.can_tune:
        command = f"fedsim tune {shlex.quote(run.folder)}"
        steps.append(NextStep(aim="Tune the attacks on public data", command=command))
    elif run.config is None and not steps:
        aim = "Record more clients, or give the attacks more iterations in the file, then"
        steps.append(NextStep(aim=aim, command=run.attack_command))
    return steps


def _is_in_doubt(summary: Summary) -> bool:
    """Return whether further victims conclude nothing, as all scores are in doubt, or the candidates of any victim."""
    is_of_candidates = describe_metric(summary.metric).evidence == "candidates"
    return summary.num_in_doubt >= (1 if is_of_candidates else summary.count)


def _steps_to_trust(run: AuditedRun) -> list[NextStep]:
    """Return what to do where no leak is shown, before that is believed."""
    folder = shlex.quote(run.folder)
    knows_defenses = any(reading.summary.knows_defenses for reading in run.readings)
    steps = []
    if run.config is not None and run.config.defense and not knows_defenses:
        command = f"{run.attack_command} --set {_KNOW_DEFENSES}"
        as_adaptive = NextStep(aim="Attack as an adaptive adversary, who knows the defense", command=command)
        steps.append(_ATTACKS_THAT_ADAPT if run.config.adversary.knowledge.defenses else as_adaptive)
    elif run.can_tune:
        steps.append(NextStep(aim="Try stronger attacks, with tuned settings", command=f"fedsim tune {folder}"))
    steps.append(NextStep(aim="Document what was shown and what was not", command=f"fedsim dossier {folder}"))
    return steps


def suggest_after_sweep(
    answer: SweepAnswer,
    *,
    knows_defenses: bool,
    folder: str = SWEEP,
    command: str = f"fedsim sweep {SWEEP}/sweep.toml --out {SWEEP}",
    is_app: bool = False,
    tables: Mapping[str, Any],
) -> list[NextStep]:
    """Return what to do after a sweep.

    Args:
        is_app: whether its cells run a Flower app, of which the command then names no folder.
        tables: of the sweep's file; a step that they take already is not advised.
    """
    if not answer.rows:
        return []
    if is_app and "--app" not in command:
        command += " --app APP"
    attacks_all = tables.get("adversary", {}).get("victims") == "all"
    with_victims = NextStep(aim="Attack all clients", command=f"{command} --set {_ALL_VICTIMS}")
    other_attacks = NextStep(aim="Add other attacks to the file, and run it again", command="fedsim list attacks")
    dossier = NextStep(aim="Document the result in a dossier", command=f"fedsim dossier {shlex.quote(folder)}")
    defended = [row for row in answer.rows if row.is_defended]
    if not defended:
        if not any(row.leaking for row in answer.rows):
            return [other_attacks if attacks_all else with_victims, dossier]
        aim = "Add an axis `defense` to the file, with some of these defenses, and run it again"
        return [NextStep(aim=aim, command="fedsim list defenses"), dossier]
    steps = []
    if not any(outcome.leaks_on_any_side for row in defended for outcome in row.outcomes):
        changes = [] if attacks_all else [_ALL_VICTIMS]
        if (tables.get("training", {}).get("local_epochs") or 1) > 1:
            changes.insert(0, "training.local_epochs=1")
        if not changes:
            return [other_attacks]
        with_settings = " --set ".join((command, *changes))
        return [
            NextStep(aim="First find a setting in which an attack succeeds without a defense", command=with_settings)
        ]
    if any(outcome.needs_seeds for row in defended for outcome in row.outcomes):
        steps.append(NextStep(aim="Add seeds, because these are too few", command=_add_seeds(command, answer.seeds)))
    if not knows_defenses and tables.get("adversary", {}).get("knowledge", {}).get("defenses"):
        steps.append(_ATTACKS_THAT_ADAPT)
    elif not knows_defenses and not is_app:  # what acts beside an app cannot be granted yet
        with_setting = f"{command} --set {_KNOW_DEFENSES}"
        steps.append(NextStep(aim="Run adaptive attacks, which know the defenses", command=with_setting))
    holding = [row.name for row in defended if row.verdict == HOLDS]
    if holding:
        aim = f"Before you rely on {enumerate_words(holding[:3])}, add another attack to the file, and run it again"
        steps.append(NextStep(aim=aim, command=command))
    elif all(row.verdict == NOT_CONCLUDED for row in defended):
        if all(outcome.lacks_adaptive_attack for row in defended for outcome in row.outcomes):
            if knows_defenses:
                aim = "Add an attack that can use the knowledge of the defenses, and run it again"
                steps.append(NextStep(aim=aim, command="fedsim list attacks"))
        else:
            steps.append(other_attacks if attacks_all else with_victims)
    else:
        aim = "No defense holds; put stronger settings or other defenses on the defense axis, and run it again"
        steps.append(NextStep(aim=aim, command="fedsim list defenses"))
    return [*steps, dossier]


def _add_seeds(command: str, seeds: Sequence[str]) -> str:
    """Return the command of a sweep with further seeds; cells that are done are not run again."""
    numbers = [int(seed) for seed in seeds]
    further = range(max(numbers) + 1, max(numbers) + 1 + _MORE_SEEDS)
    return f"{command} --set 'sweep.seeds={[*numbers, *further]}'"
