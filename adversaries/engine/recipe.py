"""An attack that matches gradients, in the words of its paper: what it minimises, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from adversaries.engine.descent import Schedule
from adversaries.engine.distances import Cosine, Distance
from adversaries.engine.places import AtBroadcast, Place
from adversaries.engine.priors import Prior
from adversaries.scene import Scene

MEAN_GRADIENT = frozenset({"learning_rate", "local_epochs", "batch_size"})
"""What an attack must know to compare the sizes of gradients, not only their directions."""
MOMENTS = frozenset({"input_mean", "input_std"})
"""The moments by which dummy data are standardised."""


def by_tenths(iteration: int, iterations: int) -> float:
    """To a tenth after 3/8, 5/8 and 7/8 of the way, as in IG's and SME's released code."""
    return 0.1 ** sum(iteration >= int(part * iterations) for part in (3 / 8, 5 / 8, 7 / 8))


def by_cosine(iteration: int, iterations: int) -> float:
    """From one to zero along a cosine."""
    return (1 + math.cos(math.pi * iteration / iterations)) / 2


def constant(iteration: int, iterations: int) -> float:
    """One."""
    return 1.0


class Jump(Protocol):
    """Changes the dummy data where no slope leads."""

    def __call__(self, scene: Scene, dummy: Tensor, taken: int, iterations: int, rng: torch.Generator) -> None:
        """Change `dummy`, `example ...` in standardised units, in place, after `taken` steps of `iterations`.

        Called before the first step, when it is noise, and after each.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One inversion attack.

    Attributes:
        place: where the dummy gradient is taken.
        distance: how it is compared with the update.
        priors: further terms of the objective with their weights.
        optimizer: `adam`, `sgd` or `lbfgs` (torch's, whose closures count as one iteration).
        step_size: of the dummy data, in standard deviations of the inputs.
        signed: feed the optimizer the sign of each pixel's gradient.
        schedule: of all step sizes.
        noise: deviation of Gaussian noise added to the dummy data after each step, in step sizes.
        emphasis: `(iteration, iterations) -> factor` of the distance, beside the priors.
        bounded: keep pixels in the valid range after each step.
        joint_labels: step size of label logits that are optimised with the data; None takes the
            labels that are granted or counted.
        epochs: how many dummy images stand for each example, one an epoch.
        normalised_by_batch: BatchNorm layers normalise the dummy data by their own statistics, as those of
            clients do in training, instead of by the running ones of w_0.
        one_step: the attack assumes T = 1; with more it warns.
        jump: what else is done to the dummy data before the first step and after each, see `Jump`.
    """

    place: Place = field(default_factory=AtBroadcast)
    distance: Distance = field(default_factory=Cosine)
    priors: Sequence[tuple[float, Prior]] = ()
    optimizer: Literal["adam", "sgd", "lbfgs"] = "adam"
    step_size: float = 1.0
    signed: bool = False
    schedule: Schedule = by_tenths
    noise: float = 0.0
    emphasis: Schedule = constant
    bounded: bool = True
    joint_labels: float | None = None
    epochs: int = 1
    normalised_by_batch: bool = False
    one_step: bool = False
    jump: Jump | None = None
