"""GradInversion: see through gradients [Yin2021]."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Knowledge, Paper
from fedsim.inversion.batch_norm import check_returned_statistics, missing_statistics_error
from fedsim.inversion.distances import SquaredL2
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import BatchNormStatistics, GroupConsistency, MeanSquare, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe, cosine_schedule
from fedsim.inversion.update_models import GradientAtBroadcast, UnrolledTraining
from fedsim.recording.wire_format import Update
from fedsim.training.modes import list_batch_norms


@dataclass(frozen=True, kw_only=True)
class SeeThroughGradients(GradientInversion):
    """Match one gradient in squared Euclidean distance with BatchNorm and group consistency priors.

    1. Optimise several restarts in step (`restarts`).
    2. Minimise, for each, the squared distance of gradients, plus total variation, the mean squared
       pixel, the distance to the client's BatchNorm statistics and the distance to the mean of the
       restarts (`_recipe`).
    3. Add Langevin noise after each step.
    4. Claim the restart with the smallest objective.

    Assumes one local step, unless `exact_statistics` is set; an update of several steps is divided
    by their number, and the attack warns.

    Args:
        iterations: steps of Adam.                                              [breaching: 20 000]
        step_size: Adam's, in standard deviations of the inputs.
        gradient_weight: weight of the squared distance between gradients.      [breaching: 1e-4]
        tv_weight: weight of total variation.                                   [breaching: 1e-4]
        norm_weight: weight of the mean squared pixel.                          [breaching: 1e-6]
        bn_weight: weight of the distance to the client's BatchNorm statistics. [breaching: 0.1]
        group_weight: weight of the distance to the mean of the restarts.
        noise: Langevin noise after each step, in step sizes.                   [breaching: 0.01]
        exact_statistics: assume that the client trained in training mode, for one epoch at most.
            The statistics of its mini-batches are computed from the running ones before and after,
            and dummy data are normalised by their own. Several steps are simulated. If no
            statistics are sent, dummy data are normalised in this way with `bn_weight = 0`.
        restarts: size of the group.

    References:
        [Yin2021]; hyperparameters from `breaching`'s preset where the paper's were not available.
        Differs: gradients are compared by squared distances, pixels and the group by mean squared
        distances; the group's mean is taken without registration; the final iterate of the best
        restart is the finding; labels may repeat, since they are granted or counted; several local
        steps may be simulated, with `exact_statistics`; 2000 iterations and 8 restarts by default.
    """

    iterations: PositiveInt = 2000
    restarts: PositiveInt = 8
    step_size: PositiveFloat = 0.1
    gradient_weight: PositiveFloat = 1e-4
    tv_weight: NonNegativeFloat = 1e-4
    norm_weight: NonNegativeFloat = 1e-6
    bn_weight: NonNegativeFloat = 0.1
    group_weight: NonNegativeFloat = 0.01
    noise: NonNegativeFloat = 0.01
    exact_statistics: bool = False

    paper: ClassVar[Paper] = cite("Yin2021")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without BatchNorm layers where their statistics count."""
        super().check_facts(knowledge, num_examples, granted)
        assert knowledge.model is not None
        if self.bn_weight and not list_batch_norms(knowledge.model()):
            raise missing_statistics_error("the network", "the model has none")

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=self.exact_statistics)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        if self.bn_weight:
            check_returned_statistics(problem)
        # Simulate the local steps of at most one epoch.
        assert problem.batch_size is not None
        unrolls_training = self.exact_statistics and problem.steps > 1
        if unrolls_training and problem.steps > math.ceil(problem.num_examples / problem.batch_size):
            raise AttackError(
                f"{problem.where}: exact_statistics follow from at most one epoch, not from {problem.steps} local "
                f"steps of B = {problem.batch_size} on {problem.num_examples} examples; set it to false"
            )
        return Recipe(
            update_model=UnrolledTraining() if unrolls_training else GradientAtBroadcast(),
            distance=SquaredL2(),
            priors=[
                (self.tv_weight / self.gradient_weight, TotalVariation()),
                (self.norm_weight / self.gradient_weight, MeanSquare()),
                (self.bn_weight / self.gradient_weight, BatchNormStatistics(exact=self.exact_statistics)),
                (self.group_weight / self.gradient_weight, GroupConsistency()),
            ],
            step_size=self.step_size,
            schedule=cosine_schedule,
            normalised_by_batch=self.exact_statistics,
            noise=self.noise,
            one_step=not unrolls_training,
        )
