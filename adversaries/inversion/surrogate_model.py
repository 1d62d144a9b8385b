"""SME: surrogate model extension [Zhu2023]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from fedsim.base.papers import cite
from fedsim.interfaces.attack import MessageKind, Paper
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule, step_decay_schedule
from fedsim.inversion.update_models import SurrogatePoint


@dataclass(frozen=True, kw_only=True)
class SurrogateModelExtension(GradientInversion):
    """Match the update at a surrogate model between w_0 and w_T, optimised with the dummy data.

    Algorithm 1, in each iteration:

    1. Compute the gradient of the dummy data at alpha w_0 + (1 - alpha) w_T (`SurrogatePoint`).
    2. Compute 1 - cosine between it and w_0 - w_T, plus total variation (`_recipe`).
    3. Move the dummy data and alpha by Adam; alpha's gradient is the inner product of Eq. 11, and
       alpha stays in [0, 1].

    Needs no knowledge of E, B or the learning rate.

    Args:
        iterations: K.                                                        [SME App. D: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [App. D: 1]
        tv_weight: lambda, dimensionless.                                     [App. D: 0.01]
        signed: feed Adam the sign of each pixel's gradient.    [Geiping et al.: yes; SME: no]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the iterations. [released code of both]
        restarts: random starts; the one with the smallest objective is the finding.  [papers: 1]
        patience: stop if the objective has not fallen by 1 % in this number of iterations; 0 never stops. [0]
        unknown_step_size: Adam's, for parts of the model that never left the client, as a private
            head: they begin random and are optimised along, and labels too, unless they are
            granted.                                                           [ours: 0.01]
        alpha: start, 1 is the broadcast model.                                  [Algorithm 1: 0.5]
        alpha_step_size: Adam's, for alpha.                                      [App. D: 0.001]
        alpha_every: compute alpha's gradient only every so many iterations; in between Adam reuses
            the last one. Saves the gradients of all weights in the second pass. [1]

    References:
        [Zhu2023], Eq. 5, Algorithm 1, App. D.
        Differs: Eq. 11 as printed has w_T - w_0, which fits the opposite sense of alpha (the weight
        of w_T, as in the released code); with Eq. 5's alpha the factor is w_0 - w_T.
    """

    step_size: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.01
    signed: bool = False
    decay: bool = True
    unknown_step_size: PositiveFloat = 0.01
    alpha: Share = 0.5
    alpha_step_size: PositiveFloat = 0.001
    alpha_every: PositiveInt = 1

    paper: ClassVar[Paper] = cite("Zhu2023")
    vector_targets: ClassVar[bool] = True
    message_kind: ClassVar[MessageKind] = "weights"

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            update_model=SurrogatePoint(
                alpha=self.alpha, step_size=self.alpha_step_size, gradient_interval=self.alpha_every
            ),
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            unknown_step_size=self.unknown_step_size,
            signed=self.signed,
            schedule=step_decay_schedule if self.decay else constant_schedule,
        )
