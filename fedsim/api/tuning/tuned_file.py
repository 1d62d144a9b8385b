"""Attack file with settings that were chosen on simulated clients, and how they were chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedsim.api.tuning.trials import SettingTrial, TunedAttack
from fedsim.base.files import write_text
from fedsim.federation.adversary_tables import is_stated
from fedsim.federation.config import Config
from fedsim.interfaces.metric import describe_metric


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
