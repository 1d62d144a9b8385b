"""Joint inversion: the updates that one client sent in several rounds, matched by one set of dummy data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Finding
from fedsim.inversion.descent import Step
from fedsim.inversion.distances import Cosine, Tensors
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import INPUT_MOMENTS, MEAN_GRADIENT_FACTS, Recipe, constant_schedule, step_decay_schedule
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.inversion.update_models import FullBatchTraining
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class JointInversion(GradientInversion):
    """Match the updates of several rounds of a client at once, with its local training simulated.

    A client that takes the same N examples in every round tells more in several rounds than in one:
    each update is another set of equations for the same examples.

    1. Read the updates of all attacked rounds (`_run`).
    2. Simulate the local training of each round from that round's w_t on the dummy data, all of
       which each step takes (`SimulatedRounds`).
    3. Minimise the mean over rounds of 1 - cosine between simulated and recorded update, plus total
       variation (`_recipe`).

    Rounds help as far as the model changed between them: two that follow one another are nearly the
    same equations. Clients must take all their examples in each step (B of at least N, or a gradient of them all)
    and train by SGD.

    Args:
        iterations: K.                                                     [as `sme`: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [as `sme`: 1]
        tv_weight: lambda, dimensionless.                                  [as `sme`: 0.01]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the iterations.  [as `sme`]

    References:
        Unpublished. Differs: from TGIAs-RO [Li2023b], which aggregates what several gradients give,
        by one objective for all rounds, and by local training of several steps.
    """

    step_size: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.01
    decay: bool = True

    paper: ClassVar[Paper] = cite("Fedsim2026")
    rounds_needed: ClassVar[RoundsNeeded] = "all"
    simulates_training: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | OPTIMIZER_FACTS | {"labels"}

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse clients that take a part of their examples in each step."""
        super().check_facts(knowledge, num_examples, granted)
        if num_examples is not None:
            _check_batches(knowledge.batch_size, num_examples, "the clients")

    def _run(self, target: Target, progress: Progress) -> Finding:
        first, *later = [target.read_update(number) for number in target.participation_rounds()]
        problems = [_full_batch_problem(update, target.knowledge) for update in (first, *later)]
        if len({problem.num_examples for problem in problems}) > 1:
            sizes = ", ".join(str(problem.num_examples) for problem in problems)
            raise AttackError(
                f"client {target.victim}: N differs between rounds ({sizes}), so they are of different examples; "
                "attack rounds with the same (adversary.rounds)"
            )
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        matcher = _RoundsMatcher(**settings, later=tuple(problems[1:]))
        return matcher.with_title(self.title).invert(first, target.knowledge, target.rng, progress)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return self._joint_recipe(())

    def _joint_recipe(self, later: Sequence[InversionProblem]) -> Recipe:
        """Return the recipe for the round of the problem and for `later` ones."""
        return Recipe(
            update_model=SimulatedRounds(later=later),
            distance=RoundsCosine(later=later),
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            schedule=step_decay_schedule if self.decay else constant_schedule,
        )


@dataclass(frozen=True, kw_only=True)
class _RoundsMatcher(JointInversion):
    """The attack on one victim, of whom it has the problems of all rounds but the first."""

    later: Sequence[InversionProblem] = ()

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return self._joint_recipe(self.later)

    def _solo_batch(self, task: InversionTask) -> Sequence[Step] | None:
        """Return None: the weights of later rounds are not among the tensors that can be batched."""
        return None


def _full_batch_problem(update: Update, knowledge: Knowledge) -> InversionProblem:
    """Return the problem of one round."""
    problem = build_problem(update, knowledge)
    _check_batches(problem.batch_size, problem.num_examples, problem.where)
    return problem


def _check_batches(batch_size: int | None, num_examples: int, where: str) -> None:
    """Raise AttackError where a step takes only some of N examples."""
    assert batch_size is not None
    if batch_size < num_examples:
        raise AttackError(
            f"{where}: steps take {batch_size} of N = {num_examples} examples each, and in which order is unknown, "
            "so several rounds cannot be simulated together; choose 'dlfa' for one round"
        )


@dataclass(frozen=True, kw_only=True)
class SimulatedRounds(FullBatchTraining):
    """Mean steps of simulated local training with all examples in each step, of several rounds.

    Attributes:
        later: rounds after that of the problem.
    """

    later: Sequence[InversionProblem] = ()

    def gradient(
        self, problem: InversionProblem, values: Mapping[str, Tensor], dummy: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Simulate each round on the dummy data; return the mean steps of all rounds, one after another."""
        steps: list[Tensor] = []
        for round_problem in (problem, *self.later):
            steps += super().gradient(replace(round_problem, model=problem.model), values, dummy, labels)
        return steps


@dataclass(frozen=True, kw_only=True)
class RoundsCosine:
    """Mean over rounds of one minus the cosine between simulated and recorded update.

    Attributes:
        later: rounds after that of the problem.
    """

    later: Sequence[InversionProblem] = ()

    def target(self, problem: InversionProblem) -> list[Tensor]:
        """Return the updates of all rounds at norm 1, one after another."""
        return [tensor for round_problem in (problem, *self.later) for tensor in Cosine().target(round_problem)]

    def __call__(self, gradient: Tensors, target: Tensors) -> Tensor:
        """Return the mean distance."""
        count = len(target) // (1 + len(self.later))
        distances = []
        for start in range(0, len(target), count):
            distances.append(Cosine()(gradient[start : start + count], target[start : start + count]))
        return torch.stack(distances).mean()
