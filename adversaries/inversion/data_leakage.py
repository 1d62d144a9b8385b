"""DLFA: data leakage in federated averaging (Dimitrov, Balunović, Konstantinov, Vechev 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.distances import SquaredL2
from adversaries.engine.matching import GradientInversion
from adversaries.engine.places import AlongTraining
from adversaries.engine.priors import EpochConsistency, SoftBounds, SquaredTotalVariation
from adversaries.engine.recipe import MEAN_GRADIENT, Recipe
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.scene import Scene
from fedsim.attacks import Paper
from fedsim.errors import ConfigError
from fedsim.metrics import match


@dataclass(frozen=True, kw_only=True)
class DataLeakage(GradientInversion):
    """Simulate the client's whole local training on dummy data, a set for each epoch, and match its outcome.

    The "full input reconstruction with epoch order-invariant prior". Cost and memory grow with the
    number of local steps. Needs to know E or T, B and the learning rate. Follows momentum, weight decay and FedProx's
    proximal term where they are granted, and is refused where clients are known to train by another optimizer than SGD.

    Args:
        iterations: steps of Adam.                                             [released code: 400]
        step_size: Adam's, in standard deviations of the inputs.               [FEMNIST .4, CIFAR .1]
        decay: factor of the step size each ten iterations.                    [FEMNIST .995; .9985]
        emphasis: the distance's factor at the start and at its end.           [FEMNIST 1, 2; 4, 2]
        emphasis_iterations: from start to end, geometrically.                 [released code: 200]
        tv_weight: of squared total variation.                                 [FEMNIST .001; .0002]
        bounds_weight: of squared distance to the range of pixels.             [FEMNIST 2; 10]
        order_weight: of the difference between the epochs' mean images.       [FEMNIST 1000]
        restarts: random starts; the one with the smallest objective is the finding.
        patience: stop when the objective has not fallen by 1 % for so many iterations; 0 never.
        compile: trace and compile both backward passes, see `adversaries.engine.compiled`.
        precision: `bfloat16` computes convolutions and linear layers in it.

    References:
        Dimitrov et al.: Data Leakage in Federated Averaging, TMLR 2022; sizes from its
        released code. Differs: the order prior is the mean image of an epoch for all data (the code
        takes maxima of random features for CIFAR); labels are in one random order, the same in each epoch.
    """

    iterations: int = 400
    step_size: float = 0.4
    decay: float = 0.995
    emphasis: tuple[float, float] = (1.0, 2.0)
    emphasis_iterations: int = 200
    tv_weight: float = 0.001
    bounds_weight: float = 2.0
    order_weight: float = 1000.0

    paper: ClassVar[Paper] = Paper(
        title="Data Leakage in Federated Averaging",
        authors="Dimitrov, Balunović, Konstantinov, Vechev",
        venue="TMLR",
        year=2022,
        url="https://arxiv.org/abs/2206.12395",
    )
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "step_size", "decay", "emphasis_iterations")
        if len(self.emphasis) != 2 or not all(0 < value < math.inf for value in self.emphasis):
            raise ConfigError(f"emphasis: expected two finite values above 0, got {list(self.emphasis)}")
        check_not_negative(self, "tv_weight", "bounds_weight", "order_weight")

    def _recipe(self, scene: Scene) -> Recipe:
        first, last = self.emphasis

        def emphasis(iteration: int, iterations: int) -> float:
            return float(first * (last / first) ** min(1.0, iteration / self.emphasis_iterations))

        return Recipe(
            place=AlongTraining(),
            # The code compares sums of gradients and divides by their number; here they are means.
            distance=SquaredL2(layers=tuple(scene.steps * weight for weight in _layer_weights(scene))),
            priors=[
                (self.tv_weight, SquaredTotalVariation()),
                (self.bounds_weight, SoftBounds()),
                (self.order_weight, EpochConsistency()),
            ],
            step_size=self.step_size,
            schedule=lambda iteration, iterations: float(self.decay ** (iteration / 10)),
            emphasis=emphasis,
            bounded=False,
            epochs=epochs_of(scene),
        )

    def _merged(self, data: Tensor, scene: Scene) -> Tensor:
        return mean_of_epochs(data, scene)


def mean_of_epochs(data: Tensor, scene: Scene) -> Tensor:
    """The mean of the epochs' examples, each assigned to those of the first epoch by least squared error."""
    assert scene.batch_size is not None
    whole = max(1, scene.steps // math.ceil(scene.num_examples / scene.batch_size))
    first, *others = torch.split(data, scene.num_examples)[:whole]  # of a pass cut short some examples were not used
    return torch.stack([first, *(epoch[match(epoch, first)] for epoch in others)]).mean(0)


def epochs_of(scene: Scene) -> int:
    """How many passes the client took over its examples, the last one perhaps cut short."""
    assert scene.batch_size is not None
    return math.ceil(scene.steps / math.ceil(scene.num_examples / scene.batch_size))


def _layer_weights(scene: Scene) -> list[float]:
    """1, 1/e, 1/e^2 ... from the first layer on; a layer's weight and bias share theirs."""
    layers: dict[str, int] = {}
    return [math.exp(-layers.setdefault(name.rpartition(".")[0], len(layers))) for name in scene.names]
