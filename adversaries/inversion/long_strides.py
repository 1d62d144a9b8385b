"""Long strides: fedsim's own variant of SME, with a curved path in place of the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule, step_decay_schedule
from fedsim.inversion.update_models import MidpointTraining


@dataclass(frozen=True, kw_only=True)
class LongStrides(GradientInversion):
    """Simulate local training by a few long steps of the midpoint rule and match its update.

    A compromise between `sme`, which takes one gradient on the line between w_0 and w_T, and
    `dlfa`, which unrolls all T steps: an iteration costs 2 x strides gradients, independently of T.
    Needs no knowledge of E, B or the learning rate. Meant for many local steps of plain SGD.

    Args:
        iterations: K.                                                     [as `sme`: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [as `sme`: 1]
        tv_weight: lambda, dimensionless.                                  [as `sme`: 0.01]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the iterations.  [as `sme`]
        strides: number of long steps.

    References:
        Unpublished. Differs: from SME [Zhu2023], whose settings it has, by a curved path in place
        of the line; from DLFA [Dimitrov2022] by strides in place of local steps, and by one dummy
        image an example.
    """

    step_size: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.01
    decay: bool = True
    strides: PositiveInt = 2

    paper: ClassVar[Paper] = cite("Fedsim2026")

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            update_model=MidpointTraining(strides=self.strides),
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            schedule=step_decay_schedule if self.decay else constant_schedule,
        )
