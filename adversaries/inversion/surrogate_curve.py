"""NL-SME: SME with a curve in place of the line between the broadcast and the returned model [Xia2025]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, Share
from fedsim.base.papers import cite
from fedsim.interfaces.attack import MessageKind, Paper
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, constant_schedule, step_decay_schedule
from fedsim.inversion.update_models import SurrogateCurve


@dataclass(frozen=True, kw_only=True)
class NonLinearSurrogate(GradientInversion):
    """Match the update at a point of a quadratic Bezier curve from w_0 to w_T, whose control point is optimised, too.

    In each iteration:

    1. Compute the gradient of the dummy data at alpha^2 w_0 + 2 alpha (1 - alpha) P +
       (1 - alpha)^2 w_T, and scale it by one factor for each parameter tensor (`SurrogateCurve`).
    2. Compute 1 - cosine between it and w_0 - w_T, total variation, and the mean squares by which
       control point and factors left their starts, the line of SME and 1 (`_recipe`).
    3. Move the dummy data, alpha, P and the factors by Adam.

    P has as many numbers as the model has weights, so a small distance says little: the curve can
    also explain an update by other data. See docs/explanation/inversion.md for what was measured.

    Args:
        iterations: K.                                                          [as `sme`: 1000]
        step_size: Adam's for the dummy data, in standard deviations of the inputs. [as `sme`: 1]
        tv_weight: lambda, dimensionless.                                       [as `sme`: 0.01]
        decay: step sizes x 0.1 after 3/8, 5/8 and 7/8 of the iterations.       [as `sme`]
        alpha: start, 1 is the broadcast model.                                 [as `sme`: 0.5]
        alpha_step_size: Adam's, for alpha.                                     [as `sme`: 0.001]
        bend_step_size: Adam's, for P, in root mean square changes of each tensor's weights. [ours]
        bend_weight: of the mean square of P's distance from the middle, in the same unit.   [ours]
        scale_step_size: Adam's, for the factors; 0 has none.                                [ours]
        scale_weight: of the mean square of the factors' distance from 1.                    [ours]

    References:
        [Xia2025], whose curve, |w| + 1 variables, regularisation and "dvec scaling" are named in
        the abstract. Differs: only the abstract was to be had; what is scaled, by what, how it is
        regularised, and all step sizes and weights are guesses.
    """

    step_size: PositiveFloat = 1.0
    tv_weight: NonNegativeFloat = 0.01
    decay: bool = True
    alpha: Share = 0.5
    alpha_step_size: PositiveFloat = 0.001
    bend_step_size: PositiveFloat = 0.01
    bend_weight: NonNegativeFloat = 0.01
    scale_step_size: NonNegativeFloat = 0.001
    scale_weight: NonNegativeFloat = 0.01

    paper: ClassVar[Paper] = cite("Xia2025")
    message_kind: ClassVar[MessageKind] = "weights"

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            update_model=SurrogateCurve(
                alpha=self.alpha,
                step_size=self.alpha_step_size,
                bend_step_size=self.bend_step_size,
                bend_weight=self.bend_weight,
                scale_step_size=self.scale_step_size,
                scale_weight=self.scale_weight,
            ),
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            schedule=step_decay_schedule if self.decay else constant_schedule,
        )
