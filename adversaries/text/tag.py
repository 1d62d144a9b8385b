"""TAG: inversion of text models by squared and absolute gradient differences [Deng2021]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.text.texts import TAG_PAPER, SingleUpdateTextAttack, TextAttack
from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.interfaces.attack import Paper
from fedsim.inversion.distances import SquaredAndAbsolute
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe, constant_schedule
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS


@dataclass(frozen=True, kw_only=True)
class Tag(SingleUpdateTextAttack):
    """Match one gradient of a text model by squared and absolute differences.

    1. Optimise dummy embeddings in place of tokens (`SingleUpdateTextAttack`).
    2. Minimise the squared plus the weighted absolute differences of gradients by Adam (`_recipe`).
    3. Claim the words whose embeddings are nearest.

    Assumes one local step; an update of several steps is divided by their number, and the attack
    warns.

    Args:
        iterations: steps of Adam.                                     [LAMP's runs of TAG: 2500]
        step_size: Adam's, in standard deviations of the embedding.    [LAMP's runs of TAG: 0.1]
        absolute: factor of the absolute differences in the first tensor; decreases linearly to the
            last.                                                      [0.01]

    References:
        [Deng2021], Sect. 3; defaults of [Balunovic2022] (LAMP), whose authors run it as baseline.
        Differs: the paper says only that the factor is larger near the inputs, here it decreases
        linearly; labels are granted or counted, not optimised; plain Adam; estimates are kept
        within the embedding's values; the gradient of the embedding is not matched; all positions
        count as words.
    """

    iterations: PositiveInt = 2500
    step_size: PositiveFloat = 0.1
    absolute: NonNegativeFloat = 0.01

    paper: ClassVar[Paper] = TAG_PAPER
    needs: ClassVar[frozenset[str]] = TextAttack.needs | MEAN_GRADIENT_FACTS
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"labels"}

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            distance=SquaredAndAbsolute(self.absolute),
            step_size=self.step_size,
            schedule=constant_schedule,
            one_step=True,
        )
