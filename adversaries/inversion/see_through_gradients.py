"""GradInversion: see through gradients (Yin et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from adversaries.engine.distances import SquaredL2
from adversaries.engine.matching import GradientInversion
from adversaries.engine.places import AlongTraining, AtBroadcast
from adversaries.engine.priors import BatchNormStatistics, GroupConsistency, Norm, TotalVariation
from adversaries.engine.recipe import MEAN_GRADIENT, Recipe, by_cosine
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.scene import Scene, scene_of
from fedsim.attacks import Knowledge, Paper
from fedsim.errors import AttackError
from fedsim.wire.messages import Update


@dataclass(frozen=True, kw_only=True)
class SeeThroughGradients(GradientInversion):
    """Match one gradient in Euclidean distance with BatchNorm statistics and a group of restarts as priors.

    The restarts are optimised in step, each drawn towards their mean. Assumes one local step; an
    update of more is divided by their number, and the attack warns, but for `exact_statistics`.

    Args:
        iterations: steps of Adam.                                              [breaching: 20 000]
        step_size: Adam's, in standard deviations of the inputs.
        gradient_weight: of the squared distance between gradients.             [breaching: 1e-4]
        tv_weight: of total variation.                                          [breaching: 1e-4]
        norm_weight: of the mean squared pixel.                                 [breaching: 1e-6]
        bn_weight: of the distance to the BatchNorm statistics that the client returned. [breaching: 0.1]
        group_weight: of the distance to the mean of the restarts.
        noise: Langevin noise after each step, in step sizes.                   [breaching: 0.01]
        exact_statistics: the client trained in training mode, for one epoch at most: its mini-batches' own
            statistics follow from the running ones before and after, and the dummy data are normalised by
            theirs. Several steps are simulated. Where no statistics are sent, the dummy data are
            normalised so with `bn_weight = 0`.
        restarts: size of the group; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Yin et al.: See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021; sizes from
        `breaching`'s preset of it, where the paper's were not available. Differs: gradients, pixels and the
        group are compared by squared, the latter two by mean squared distances; the group's mean is taken
        without registration; the final iterate of the best restart is the finding; labels may repeat,
        since they are granted or counted; several local steps may be simulated, with `exact_statistics`;
        2000 iterations and 8 restarts by default.
    """

    iterations: int = 2000
    restarts: int = 8
    step_size: float = 0.1
    gradient_weight: float = 1e-4
    tv_weight: float = 1e-4
    norm_weight: float = 1e-6
    bn_weight: float = 0.1
    group_weight: float = 0.01
    noise: float = 0.01
    exact_statistics: bool = False

    paper: ClassVar[Paper] = Paper(
        title="See through Gradients: Image Batch Recovery via GradInversion",
        authors="Yin, Mallya, Vahdat, Alvarez, Kautz, Molchanov",
        venue="CVPR",
        year=2021,
        url="https://arxiv.org/abs/2104.07586",
    )
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size", "gradient_weight")
        check_not_negative(self, "tv_weight", "norm_weight", "bn_weight", "group_weight", "noise")

    def _scene(self, update: Update, knowledge: Knowledge) -> Scene:
        return scene_of(update, knowledge, by_batch=self.exact_statistics)

    def _recipe(self, scene: Scene) -> Recipe:
        layers = [name for name, module in scene.model.named_modules() if isinstance(module, _BatchNorm)]
        kept = {f"{name}.running_mean".removeprefix(".") for name in layers} & scene.returned_buffers.keys()
        if self.bn_weight and (not layers or len(kept) < len(layers)):
            what = "the client returned no statistics of theirs" if layers else "the model has none"
            raise AttackError(f"{scene.where}: bn_weight is a prior on BatchNorm layers, and {what}; set bn_weight = 0")
        assert scene.batch_size is not None
        several = self.exact_statistics and scene.steps > 1
        if several and scene.steps > math.ceil(scene.num_examples / scene.batch_size):
            raise AttackError(
                f"{scene.where}: exact_statistics follow from at most one epoch, not from {scene.steps} local steps of "
                f"B = {scene.batch_size} on {scene.num_examples} examples; set it to false"
            )
        return Recipe(
            place=AlongTraining() if several else AtBroadcast(),
            distance=SquaredL2(),
            priors=[
                (self.tv_weight / self.gradient_weight, TotalVariation()),
                (self.norm_weight / self.gradient_weight, Norm()),
                (self.bn_weight / self.gradient_weight, BatchNormStatistics(exact=self.exact_statistics)),
                (self.group_weight / self.gradient_weight, GroupConsistency()),
            ],
            step_size=self.step_size,
            schedule=by_cosine,
            normalised_by_batch=self.exact_statistics,
            noise=self.noise,
            one_step=not several,
        )
