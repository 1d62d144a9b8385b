"""DLFA: data leakage in federated averaging [Dimitrov2022]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.base.metrics import match_examples
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.inversion.distances import SquaredL2
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import EpochConsistency, SoftBounds, SquaredTotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS, Recipe
from fedsim.inversion.update_models import UnrolledTraining


@dataclass(frozen=True, kw_only=True)
class DataLeakage(GradientInversion):
    """Simulate the client's whole local training on dummy data and match the resulting update.

    The "full input reconstruction with epoch order-invariant prior":

    1. Give each local epoch its own set of dummy data (`num_epochs`).
    2. Unroll all local steps on them, and minimise the weighted squared distance between simulated
       and recorded update, with priors (`_recipe`).
    3. Keep the epochs' mean images equal by a prior, as all epochs see the same data in another
       order.
    4. Match the epochs' images to those of the first epoch and average (`average_epochs`).

    Cost and memory grow with the number of local steps. Needs to know E or T, B and the learning
    rate. Simulates momentum, weight decay and FedProx's proximal term where they are granted;
    refuses clients that are known to train with another optimizer than SGD.

    Args:
        iterations: steps of Adam.                                             [released code: 400]
        step_size: Adam's, in standard deviations of the inputs.              [FEMNIST .4, CIFAR .1]
        decay: factor of the step size every ten iterations.                   [FEMNIST .995; .9985]
        emphasis: first and last factor of the distance in the objective.      [FEMNIST 1, 2; 4, 2]
        emphasis_iterations: over which the factor changes geometrically.      [released code: 200]
        tv_weight: weight of squared total variation.                          [FEMNIST .001; .0002]
        bounds_weight: weight of the squared distance to the pixels' range.    [FEMNIST 2; 10]
        order_weight: weight of the difference of the epochs' mean images.     [FEMNIST 1000]

    References:
        [Dimitrov2022]; hyperparameters from its released code. Differs: the order prior compares
        mean images for all data sets (the code takes maxima of random features for CIFAR); labels
        are in one random order, the same in each epoch.
    """

    iterations: PositiveInt = 400
    step_size: PositiveFloat = 0.4
    decay: PositiveFloat = 0.995
    emphasis: tuple[PositiveFloat, PositiveFloat] = (1.0, 2.0)
    emphasis_iterations: PositiveInt = 200
    tv_weight: NonNegativeFloat = 0.001
    bounds_weight: NonNegativeFloat = 2.0
    order_weight: NonNegativeFloat = 1000.0

    paper: ClassVar[Paper] = cite("Dimitrov2022")
    simulates_training: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = GradientInversion.needs | MEAN_GRADIENT_FACTS

    def _recipe(self, problem: InversionProblem) -> Recipe:
        first, last = self.emphasis

        def emphasis(iteration: int, iterations: int) -> float:
            return float(first * (last / first) ** min(1.0, iteration / self.emphasis_iterations))

        return Recipe(
            update_model=UnrolledTraining(),
            # The code compares sums of gradients and divides by their number; here they are means.
            distance=SquaredL2(layers=tuple(problem.steps * weight for weight in _layer_weights(problem))),
            priors=[
                (self.tv_weight, SquaredTotalVariation()),
                (self.bounds_weight, SoftBounds()),
                (self.order_weight, EpochConsistency()),
            ],
            step_size=self.step_size,
            schedule=lambda iteration, iterations: float(self.decay ** (iteration / 10)),
            distance_schedule=emphasis,
            bounded=False,
            epochs=num_epochs(problem),
        )

    def _merge_epochs(self, data: Tensor, problem: InversionProblem) -> Tensor:
        return average_epochs(data, problem)


def average_epochs(data: Tensor, problem: InversionProblem) -> Tensor:
    """Average each example over epochs, matched to the first epoch's by least squared error."""
    assert problem.batch_size is not None
    # Some examples of an epoch that was cut short were never used.
    whole_epochs = max(1, problem.steps // math.ceil(problem.num_examples / problem.batch_size))
    first, *later_epochs = torch.split(data, problem.num_examples)[:whole_epochs]
    return torch.stack([first, *(epoch[match_examples(epoch, first)] for epoch in later_epochs)]).mean(0)


def num_epochs(problem: InversionProblem) -> int:
    """Return the number of local epochs, counting a last one that was cut short."""
    assert problem.batch_size is not None
    return math.ceil(problem.steps / math.ceil(problem.num_examples / problem.batch_size))


def _layer_weights(problem: InversionProblem) -> list[float]:
    """Return 1, 1/e, 1/e^2, ... for the layers in their order, one entry a parameter tensor."""
    depths: dict[str, int] = {}
    weights = []
    for name in problem.parameter_names:
        depth = depths.setdefault(name.rpartition(".")[0], len(depths))
        weights.append(math.exp(-depth))
    return weights
