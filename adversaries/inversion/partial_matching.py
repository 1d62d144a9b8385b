"""FedLeak: match a part of the update, along smoothed gradients, as far as its paper could be had [Fan2025]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt, Le

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, Share
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.distances import PartialCosine
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule, step_decay_schedule


@dataclass(frozen=True, kw_only=True)
class PartialMatching(GradientInversion):
    """Match the largest entries of the victim's update, and penalise steep places of the objective.

    1. Compute the gradient of the dummy data at w_0, and compare of each tensor the share of entries that is largest
       in the update, by 1 - cosine (`PartialCosine`).
    2. Add total variation, and the norm of the objective's gradient by the dummy data, of which a second evaluation
       a bit uphill takes the place of a third derivative (`Recipe.smoothing`).
    3. Move the dummy data by Adam.

    See docs/explanation/inversion.md for what either of both was seen to move.

    Args:
        iterations: K; each evaluates two gradients where `smoothing` is not 0. [as `inverting-gradients`: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [ours: 0.1]
        tv_weight: lambda, dimensionless.                                       [as `inverting-gradients`: 0.01]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the iterations.       [as `inverting-gradients`]
        share: of the entries of each tensor that are matched; 1 matches all.   [ours: 0.5]
        smoothing: share of the step that is taken from the gradient uphill; 0 takes none. [ours: 0.5]
        smoothing_radius: how far uphill, in standard deviations of the inputs. [ours: 0.05]

    References:
        [Fan2025], of which abstract and summaries say that a subset of the gradient's entries is matched, that the
        gradient of the dummy data is penalised, and that both are approximated. Differs: only these were to be had.
        Which entries are matched, that there are as many in each tensor and the same in all iterations, the cosine,
        how the penalty is approximated, and all settings are guesses.
    """

    step_size: PositiveFloat = 0.1
    tv_weight: NonNegativeFloat = 0.01
    decay: bool = True
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    smoothing: Share = 0.5
    smoothing_radius: PositiveFloat = 0.05

    paper: ClassVar[Paper] = cite("Fan2025")

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            distance=PartialCosine(self.share),
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            schedule=step_decay_schedule if self.decay else constant_schedule,
            smoothing=self.smoothing,
            smoothing_radius=self.smoothing_radius,
        )
