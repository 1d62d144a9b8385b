"""DLG: deep leakage from gradients (Zhu, Liu, Han 2019), and iDLG (Zhao, Mopuri, Bilen 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.distances import SquaredL2
from adversaries.engine.matching import GradientInversion
from adversaries.engine.recipe import MEAN_GRADIENT, MOMENTS, Recipe, constant
from adversaries.engine.settings import check_positive
from adversaries.labels.gradients import sign_rule
from adversaries.scene import STEPPING, Scene
from fedsim.attacks import Knowledge, Paper
from fedsim.wire.messages import Update


@dataclass(frozen=True, kw_only=True)
class DeepLeakage(GradientInversion):
    """Match one gradient in Euclidean distance, the labels together with the data, by L-BFGS.

    Assumes one local step; an update of more is divided by their number, and the attack warns. Each
    iteration is a call of torch's L-BFGS, of up to 20 evaluations. Diverges easily: lower `step_size`.

    Args:
        iterations: calls of the optimizer.                                [released code: 300]
        step_size: of L-BFGS.                                              [released code: 1]
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019, Algorithm 1. Differs: dummy data are
        drawn in standardised units where clients standardise; pixels are clamped for the finding only.
    """

    iterations: int = 300
    step_size: float = 1.0

    paper: ClassVar[Paper] = Paper(
        title="Deep Leakage from Gradients",
        authors="Zhu, Liu, Han",
        venue="NeurIPS",
        year=2019,
        url="https://arxiv.org/abs/1906.08935",
    )
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT | {"num_classes"}
    uses: ClassVar[frozenset[str]] = MOMENTS | STEPPING | {"defenses"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size")

    def _recipe(self, scene: Scene) -> Recipe:
        return _by_lbfgs(self.step_size, joint_labels=True)


@dataclass(frozen=True, kw_only=True)
class ImprovedDeepLeakage(GradientInversion):
    """DLG for one example, whose label the sign of the last layer's gradient gives away.

    Assumes one local step and, unless the labels are granted, one example.

    Args:
        iterations: calls of the optimizer.                                [released code: 300]
        step_size: of L-BFGS.                                              [released code: 1]
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Zhao, Mopuri, Bilen: iDLG, 2020. Differs: as `dlg`; the sign is that of the last bias, not of its weights.
    """

    iterations: int = 300
    step_size: float = 1.0

    paper: ClassVar[Paper] = Paper(
        title="iDLG: Improved Deep Leakage from Gradients",
        authors="Zhao, Mopuri, Bilen",
        venue="arXiv",
        year=2020,
        url="https://arxiv.org/abs/2001.02610",
    )
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size")

    def _labels(self, scene: Scene, update: Update, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
        if knowledge.labels is not None:
            return super()._labels(scene, update, knowledge, rng)
        return sign_rule(scene, scene.before[0].new_zeros((1, *(knowledge.input_shape or ()))))

    def _recipe(self, scene: Scene) -> Recipe:
        return _by_lbfgs(self.step_size, joint_labels=False)


def _by_lbfgs(step_size: float, *, joint_labels: bool) -> Recipe:
    """What both attacks minimise, and how."""
    return Recipe(
        distance=SquaredL2(),
        optimizer="lbfgs",
        step_size=step_size,
        schedule=constant,
        bounded=False,
        joint_labels=step_size if joint_labels else None,
        one_step=True,
    )
