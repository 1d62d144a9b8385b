"""IG: inverting gradients with cosine similarity [Geiping2020]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule, step_decay_schedule


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(GradientInversion):
    """Match the victim's update as if it were one gradient at w_0, in cosine distance.

    1. Compute the gradient of the dummy data at w_0.
    2. Minimise 1 - cosine between it and w_0 - w_T, plus total variation, by Adam (`_recipe`).

    With more than one local step the update is no gradient at w_0; `sme` removes the error that
    this causes (SME, Eq. 2).

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

    References:
        [Geiping2020], as run in [Zhu2023] (SME), Sect. 3.1 and App. D. Differs: the defaults are
        those of the latter, which compares the two under equal settings; Geiping et al. themselves
        use step_size 0.1, signed, and more iterations.
    """

    step_size: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.01
    signed: bool = False
    decay: bool = True
    unknown_step_size: PositiveFloat = 0.01

    paper: ClassVar[Paper] = cite("Geiping2020")
    vector_targets: ClassVar[bool] = True

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            unknown_step_size=self.unknown_step_size,
            signed=self.signed,
            schedule=step_decay_schedule if self.decay else constant_schedule,
        )
