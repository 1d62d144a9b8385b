"""TAG: texts by the squared and the absolute distance of gradients (Deng et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.engine.distances import SquaredAndAbsolute
from adversaries.engine.recipe import MEAN_GRADIENT, Recipe, constant
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.scene import STEPPING, Scene
from adversaries.text.texts import TAG, FromOneUpdate, TextAttack
from fedsim.attacks import Paper


@dataclass(frozen=True, kw_only=True)
class Tag(FromOneUpdate):
    """Match one gradient of a text model by squared and absolute differences; claim the words nearest to what is found.

    Assumes one local step; an update of more is divided by their number, and the attack warns.

    Args:
        iterations: steps of Adam.                                               [LAMP's runs of TAG: 2500]
        step_size: Adam's, in standard deviations of the embedding.              [LAMP's runs of TAG: 0.1]
        absolute: factor of the absolute differences in the first tensor; falls linearly to the last. [0.01]
        nearest: how the token nearest to a found vector is looked up: by `euclidean` distance or by `cosine`.
        words: which tokens may be claimed: those of the whole `vocabulary`, or those `touched`, whose row of the
            embedding's gradient is not zero.
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Deng et al.: TAG: Gradient Attack on Transformer-based Language Models, 2021, Sect. 3; defaults of Balunović et
        al.: LAMP, NeurIPS 2022, who run it as baseline. Differs: the paper says only that the factor is larger near the
        inputs, here it falls linearly; labels are granted or counted, not found along; plain Adam; estimates are kept
        within the embedding's values; the gradient of the embedding is not matched; all places count as words.
    """

    iterations: int = 2500
    step_size: float = 0.1
    absolute: float = 0.01

    paper: ClassVar[Paper] = TAG
    needs: ClassVar[frozenset[str]] = TextAttack.needs | MEAN_GRADIENT
    uses: ClassVar[frozenset[str]] = STEPPING | {"labels"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size")
        check_not_negative(self, "absolute")

    def _recipe(self, scene: Scene) -> Recipe:
        return Recipe(
            distance=SquaredAndAbsolute(self.absolute), step_size=self.step_size, schedule=constant, one_step=True
        )
