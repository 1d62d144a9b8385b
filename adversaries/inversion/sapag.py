"""SAPAG: a self-adaptive privacy attack from gradients [Wang2020b]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.distances import GaussianKernel
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe, step_decay_schedule


@dataclass(frozen=True, kw_only=True)
class SelfAdaptiveLeakage(GradientInversion):
    """Match one gradient by a Gaussian kernel for each layer, whose width adapts to the gradient.

    1. Set each layer's kernel width by the variance of its recorded gradient (`GaussianKernel`).
    2. Minimise the kernel distances of dummy and recorded gradient, summed over layers (`_recipe`).

    Assumes one local step; an update of several steps is divided by their number, and the attack
    warns.

    Args:
        iterations: steps of Adam.
        step_size: Adam's, in standard deviations of the inputs.

    References:
        [Wang2020b], written from its description as a baseline in TGIAs-RO ([Li2023b], Sect. 4.1):
        DLG with a Gaussian kernel in place of the squared distance. Differs: Adam, bounded pixels,
        labels that are granted or counted; all layers weigh the same; see `GaussianKernel` for its
        width.
    """

    iterations: PositiveInt = 1000
    step_size: PositiveFloat = 0.1

    paper: ClassVar[Paper] = cite("Wang2020b")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(distance=GaussianKernel(), step_size=self.step_size, schedule=step_decay_schedule, one_step=True)
