"""DLG: deep leakage from gradients [Zhu2019], and iDLG [Zhao2020]."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Knowledge, Paper
from fedsim.inversion.distances import SquaredL2
from fedsim.inversion.labels.gradients import check_single_example, sign_rule
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.model_checks import random_inputs
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import INPUT_MOMENTS, MEAN_GRADIENT_FACTS, Recipe, constant_schedule
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class DeepLeakage(GradientInversion):
    """Match one gradient in squared Euclidean distance by L-BFGS, optimising data and labels.

    1. Start from Gaussian dummy data and label logits.
    2. Compute the dummy gradient at w_0, of the data and the softmax of the logits.
    3. Minimise its squared distance to the recorded gradient by L-BFGS (`_lbfgs_recipe`).

    Assumes one local step; an update of several steps is divided by their number, and the attack
    warns. Each iteration is one call of torch's L-BFGS, with up to 20 evaluations. Diverges easily:
    lower `step_size`.

    Args:
        iterations: calls of the optimizer.                                [released code: 300]
        step_size: of L-BFGS.                                              [released code: 1]

    References:
        [Zhu2019], Algorithm 1. Differs: dummy data are drawn in standardised units where clients
        standardise; pixels are clamped only in the finding.
    """

    iterations: PositiveInt = 300
    step_size: PositiveFloat = 1.0

    paper: ClassVar[Paper] = cite("Zhu2019")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS | {"num_classes"}
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | OPTIMIZER_FACTS | {"defenses"}

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return _lbfgs_recipe(self.step_size, joint_labels=True)


@dataclass(frozen=True, kw_only=True)
class ImprovedDeepLeakage(GradientInversion):
    """Run DLG on one example, with the label read from the sign of the last layer's gradient.

    1. Claim the only class whose entry in the last bias's gradient is negative (`_labels`).
    2. Optimise the data alone, as DLG does (`_lbfgs_recipe`).

    Assumes one local step and, unless the labels are granted, one example.

    Args:
        iterations: calls of the optimizer.                                [released code: 300]
        step_size: of L-BFGS.                                              [released code: 1]

    References:
        [Zhao2020]. Differs: as `dlg`; the sign is that of the last bias, not of its weights.
    """

    iterations: PositiveInt = 300
    step_size: PositiveFloat = 1.0

    paper: ClassVar[Paper] = cite("Zhao2020")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse several examples whose labels are not granted."""
        super().check_facts(knowledge, num_examples, granted)
        if num_examples is not None and "labels" not in granted:
            check_single_example(num_examples, "the clients")

    def _labels(self, problem: InversionProblem, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
        if knowledge.labels is not None:
            return super()._labels(problem, update, knowledge, rng)
        return sign_rule(problem, random_inputs(knowledge, problem.before[0]))

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return _lbfgs_recipe(self.step_size, joint_labels=False)


def _lbfgs_recipe(step_size: float, *, joint_labels: bool) -> Recipe:
    return Recipe(
        distance=SquaredL2(),
        optimizer="lbfgs",
        step_size=step_size,
        schedule=constant_schedule,
        bounded=False,
        label_step_size=step_size if joint_labels else None,
        one_step=True,
    )
