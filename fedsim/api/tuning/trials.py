"""Trials of an attack's settings on simulated clients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedsim.api import pipeline
from fedsim.api.adversaries import Adversary
from fedsim.audit.audit import Audit
from fedsim.audit.evaluation.evaluator import evaluator_of
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.finding_files import load_claim
from fedsim.audit.plan import AttackJob, ReportJobProgress
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.randomness import generator
from fedsim.federation.adversary_tables import AttackTable
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.interfaces.metric import sort_metrics

_UNSIGNED_STEPS, _SIGNED_STEPS = (0.03, 0.1, 0.3, 1.0), (0.03, 0.1, 0.3)
"""Step sizes that are tried, in standard deviations of the inputs."""
_FACTORS: Sequence[Sequence[float]] = ((0.1, 10.0), (0.3, 3.0))
"""Factors of the weight of total variation that are tried, one group after the other."""
_PRIOR_WEIGHTS = (0.001, 0.01, 0.1)
"""Weights that are tried first where it is 0."""


@dataclass(frozen=True, kw_only=True)
class SettingTrial:
    """One setting of an attack, tried on all simulated clients.

    Attributes:
        changes: settings that differ from those of the experiment.
        iterations: of the attack in this trial.
        metric: how the claimed examples were compared with the public ones.
        higher_is_better: whether higher scores are better.
        score: mean over clients; NaN where the attack failed on one.
        objective: mean of the attack's objective at the end; NaN where it keeps no such curve.
        l_sim: mean distance to the message at the end, likewise.
    """

    changes: Mapping[str, Any]
    iterations: int
    metric: str = ""
    higher_is_better: bool = True
    score: float = math.nan
    objective: float = math.nan
    l_sim: float = math.nan

    @property
    def rank(self) -> float:
        """Return a number that is higher for a better score."""
        if math.isnan(self.score):
            return -math.inf
        return self.score if self.higher_is_better else -self.score


@dataclass(frozen=True, kw_only=True)
class TunedAttack:
    """One attack with the settings that were chosen.

    Attributes:
        table: of the attack, with them.
        trials: all that were tried, the experiment's own settings first.
    """

    table: AttackTable
    trials: Sequence[SettingTrial]

    @property
    def best_trial(self) -> SettingTrial:
        """Return the trial whose settings were chosen."""
        return find_best_trial(self.trials)


def find_best_trial(trials: Sequence[SettingTrial]) -> SettingTrial:
    """Return the best of the longest trials, the first of equal ones.

    >>> short = SettingTrial(changes={}, iterations=200, score=18.0)
    >>> long = SettingTrial(changes={"step_size": 0.1}, iterations=1000, score=14.0)
    >>> find_best_trial([short, long]).changes
    {'step_size': 0.1}
    """
    longest = max(trial.iterations for trial in trials)
    return max(trials, key=lambda trial: (trial.iterations == longest, trial.rank))


def explain_refusal(title: str, attack: Attack) -> str:
    """Return why an attack cannot be tuned; empty where it can."""
    if not hasattr(attack, "step_size") or not hasattr(attack, "iterations"):
        return f"'{title}' has no step size, so there is nothing to tune"
    if attack.builds_on is not None:
        return f"'{title}' builds on another attack, which is not made of simulated clients"
    if not attack.reads_one_round():
        return f"'{title}' reads several rounds, and clients are simulated for one"
    return ""


def step_size_changes(attack: Any) -> list[dict[str, Any]]:
    """Return changes of the step size and its sign, the present settings first."""
    changes: list[dict[str, Any]] = [{}]
    if not hasattr(attack, "signed"):
        for size in _UNSIGNED_STEPS:
            if size != attack.step_size:
                changes.append({"step_size": size})
        return changes
    for signed, sizes in ((True, _SIGNED_STEPS), (False, _UNSIGNED_STEPS)):
        for size in sizes:
            if (size, signed) != (attack.step_size, attack.signed):
                changes.append({"step_size": size, "signed": signed})
    return changes


def prior_changes(attack: Any, best: Mapping[str, Any], factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return changes of the weight of total variation, beside the best settings so far.

    >>> from types import SimpleNamespace
    >>> prior_changes(SimpleNamespace(tv_weight=0.01), {"signed": True}, [10.0])
    [{'signed': True, 'tv_weight': 0.1}]
    """
    if not hasattr(attack, "tv_weight"):
        return []
    weight = best.get("tv_weight", attack.tv_weight)
    if not weight:
        return [{**best, "tv_weight": first_weight} for first_weight in _PRIOR_WEIGHTS]
    return [{**best, "tv_weight": float(f"{weight * factor:.3g}")} for factor in factors]


def finalist_changes(attack: Any, best: Mapping[str, Any], iterations: int) -> list[dict[str, Any]]:
    """Return the settings that are tried in full length: the present ones, and the best of the short trials.

    A step size that is best in few iterations is too large in many, so its halves are tried, too, down to that which
    goes as far in all iterations.

    Args:
        iterations: of the short trials.

    >>> from types import SimpleNamespace
    >>> finalist_changes(SimpleNamespace(iterations=400, step_size=1.0), {"step_size": 0.4}, 100)
    [{}, {'step_size': 0.4}, {'step_size': 0.2}, {'step_size': 0.1}]
    """
    size = best.get("step_size", attack.step_size)
    changes: list[dict[str, Any]] = [{}]
    factor = 1.0
    while factor >= iterations / attack.iterations:
        change = {**best, "step_size": float(f"{size * factor:.3g}")}
        if factor < 1 or best:
            changes.append(change)
        factor /= 2
    return changes


class SimulatedTrials:
    """Trials of one attack on the run of the simulated clients, which keeps their findings.

    Args:
        position: the attack's among those that are tuned.
        iterations: of a trial, at most.
    """

    def __init__(
        self,
        run: OpenRun,
        config: Config,
        position: int,
        table: AttackTable,
        attack: Attack,
        iterations: int,
        follow: ReportJobProgress | None,
    ) -> None:
        self._run, self._config, self._follow = run, config, follow
        self._position, self._table, self._attack = position, table, attack
        self._all_iterations: int = attack.iterations  # type: ignore[attr-defined]
        self._iterations = min(iterations, self._all_iterations)

    def tune(self) -> TunedAttack:
        """Try step sizes first, then weights of the prior with the best of them, then finalists in full length."""
        trials = self._try(step_size_changes(self._attack))
        for factors in _FACTORS:
            trials += self._try(prior_changes(self._attack, find_best_trial(trials).changes, factors))
        if self._iterations < self._all_iterations:
            finalists = finalist_changes(self._attack, find_best_trial(trials).changes, self._iterations)
            trials += self._try(finalists, self._all_iterations)
        settings = {**self._table.model_dump(exclude_none=True), **find_best_trial(trials).changes}
        return TunedAttack(table=AttackTable(**settings), trials=trials)

    def _try(self, changes: Sequence[Mapping[str, Any]], iterations: int = 0) -> list[SettingTrial]:
        """Attack all simulated clients with each of the changed settings, by default in short trials."""
        if not changes:
            return []
        iterations = iterations or self._iterations
        # Attacks are naive: what a defense does to the message is in it all the same.
        knowledge = self._config.adversary.knowledge.model_dump(mode="json", exclude_unset=True) | {"defenses": False}
        adversary = {**self._config.adversary.model_dump(mode="json", exclude_unset=True), "knowledge": knowledge}
        tables = [self._trial_table(change, iterations) for change in changes]
        spec = validate_tables(AttackFile, {"adversary": adversary, "attack": tables}, "tune")
        paths = defaultdict[str, list[Path]](list)
        trials = []
        with pipeline.begin_audit(self._run, Adversary(spec=spec, command="fedsim tune"), trust=True) as audit:
            # Attack; findings that are there already are kept.
            jobs: list[AttackJob] = []
            failures = audit.run(self._follow, planned_jobs=jobs)
            for job in jobs:
                paths[job.title].append(audit.cache.finding_path(job))
            # Compare what was found with the public examples.
            for table, change in zip(spec.attack, changes, strict=True):
                trials.append(self._score_trial(audit, paths[table.title], change, iterations))
        if math.isnan(find_best_trial(trials).score):
            raise AttackError(f"tune: {failures[0] if failures else 'no trial has a score'}")
        return trials

    def _trial_table(self, changes: Mapping[str, Any], iterations: int) -> dict[str, Any]:
        """Return the table of the attack in a trial, whose label says what is tried."""
        label = str(self._position + 1)
        for name, value in changes.items():
            label += f" {name}={value}"
        settings = {**self._table.model_dump(exclude={"label", "tuned"}), **changes, "iterations": iterations}
        if hasattr(self._attack, "restarts"):
            settings["restarts"] = 1
        return {**settings, "label": label}

    def _score_trial(
        self, audit: Audit, paths: Sequence[Path], changes: Mapping[str, Any], iterations: int
    ) -> SettingTrial:
        """Return the mean scores of a trial over clients, and where its objective ended."""
        failed = SettingTrial(changes=changes, iterations=iterations)
        if not paths or not all(map(Path.is_file, paths)):
            return failed
        by_metric = defaultdict[str, list[Score]](list)
        ends = defaultdict[str, list[float]](list)
        for path in paths:
            finding, about = load_claim(path)
            if not isinstance(finding, Reconstruction | Texts):
                raise ConfigError(f"tune: '{self._table.title}' claims no examples, so there is nothing to compare")
            truth = evaluator_of(finding).truth(finding, about, audit.case)
            assert truth is not None, "simulated clients hold known examples"
            rng = generator(self._config.federation.seed, "tune", "guesses")
            for score in score_examples(finding, truth, public=None, rng=rng):
                if not score.missing:
                    by_metric[score.metric].append(score)
            # Where its curves ended.
            for name in ("objective", "l_sim"):
                if name in finding.trace:
                    ends[name].append(float(finding.trace[name][-1]))
        if not by_metric:
            return failed
        main = self._attack.main_metric
        metric = main if main in by_metric else sort_metrics(by_metric)[0]
        scores = by_metric[metric]
        return replace(
            failed,
            metric=metric,
            higher_is_better=scores[0].higher_is_better,
            score=fmean(score.value for score in scores),
            objective=fmean(ends["objective"] or [math.nan]),
            l_sim=fmean(ends["l_sim"] or [math.nan]),
        )
