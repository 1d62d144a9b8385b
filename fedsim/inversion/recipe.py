"""Recipe of an attack that matches gradients: its objective and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedsim.base.errors import KnowledgeError
from fedsim.base.loss_term import prediction_loss
from fedsim.base.task import Goal, takes_targets
from fedsim.interfaces.attack import Knowledge, warn
from fedsim.inversion.descent import Schedule
from fedsim.inversion.differentiability import find_output_shape
from fedsim.inversion.distances import Cosine, Distance
from fedsim.inversion.named_states import missing_part_error, running_statistic_names
from fedsim.inversion.parametrisations import Parametrisation
from fedsim.inversion.priors import Prior
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.update_models import GradientAtBroadcast, UpdateModel
from fedsim.recording.wire_format import Update

MEAN_GRADIENT_FACTS = frozenset({"learning_rate", "local_epochs", "batch_size"})
"""Facts that an attack must know to compare the sizes of gradients, not only their directions."""
INPUT_MOMENTS = frozenset({"input_mean", "input_std"})
"""Facts by which dummy data are standardised."""


def step_decay_schedule(iteration: int, iterations: int) -> float:
    """Return 1, divided by ten after 3/8, 5/8 and 7/8 of the iterations (IG's and SME's code).

    >>> [step_decay_schedule(iteration, 8) for iteration in (0, 3)]
    [1.0, 0.1]
    """
    return 0.1 ** sum(iteration >= int(part * iterations) for part in (3 / 8, 5 / 8, 7 / 8))


def cosine_schedule(iteration: int, iterations: int) -> float:
    """Return a factor that falls from 1 to 0 along a cosine."""
    return (1 + math.cos(math.pi * iteration / iterations)) / 2


def constant_schedule(iteration: int, iterations: int) -> float:
    """Return 1."""
    return 1.0


class DiscreteStep(Protocol):
    """Discrete change of the dummy data, which no gradient makes, such as a swap of words."""

    def __call__(
        self, problem: InversionProblem, dummy: Tensor, steps_taken: int, iterations: int, rng: torch.Generator
    ) -> None:
        """Change `dummy`, `example ...`, standardised, in place.

        Called before the first step, when it is noise, and after each step.

        Args:
            steps_taken: number of steps before this call, of `iterations`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Objective and optimizer of one inversion attack.

    Attributes:
        update_model: computes the update of the dummy data.
        distance: compares it with the recorded update.
        priors: further terms of the objective with their weights.
        parametrisation: makes dummy data of what is optimised in their place, and adds its penalty
            to the objective; None optimises the dummy data themselves.
        optimizer: `adam`, `sgd` or `lbfgs` (torch's, one call of which counts as one iteration).
        step_size: of the dummy data, in standard deviations of the inputs.
        signed: pass the sign of each pixel's gradient to the optimizer.
        schedule: of all step sizes.
        noise: standard deviation of Gaussian noise added to the dummy data after each step, in
            step sizes.
        distance_schedule: `(iteration, iterations) -> factor` of the distance in the objective.
        bounded: clamp pixels to the valid range after each step.
        label_step_size: step size of label logits that are optimised together with the data; None
            uses the labels that are granted or counted.
        unknown_step_size: of Adam for parts of the model that never left the client, which are
            optimised together with the data; None for an attack that needs all of the model.
        epochs: number of dummy images for each example, one an epoch.
        normalised_by_batch: BatchNorm layers normalise the dummy data by their own statistics, as
            those of clients do in training, instead of by the running ones of w_0.
        one_step: the attack assumes T = 1 and warns if it is more.
        discrete_step: changes the dummy data before the first step and after each.
        smoothing: share w of the gradient of the dummy data that is taken a bit uphill: with g(x) the objective's
            gradient, (1 - w) g(x) + w g(x + r g(x) / rms g(x)). To first order that adds w r times the norm of the
            gradient (root mean square) to the objective, without a third derivative; it costs a second evaluation.
        smoothing_radius: r, in standard deviations of the inputs.
        relu_width: lets the gradient see that ReLUs switch, see `SmoothReluJumps`; 0 does not.
    """

    update_model: UpdateModel = field(default_factory=GradientAtBroadcast)
    distance: Distance = field(default_factory=Cosine)
    priors: Sequence[tuple[float, Prior]] = ()
    parametrisation: Parametrisation | None = None
    optimizer: Literal["adam", "sgd", "lbfgs"] = "adam"
    step_size: float = 1.0
    signed: bool = False
    schedule: Schedule = step_decay_schedule
    noise: float = 0.0
    distance_schedule: Schedule = constant_schedule
    bounded: bool = True
    label_step_size: float | None = None
    unknown_step_size: float | None = None
    epochs: int = 1
    normalised_by_batch: bool = False
    one_step: bool = False
    discrete_step: DiscreteStep | None = None
    smoothing: float = 0.0
    smoothing_radius: float = 0.0
    relu_width: float = 0.0


def match_private_parts(recipe: Recipe, problem: InversionProblem, update: Update, knowledge: Knowledge) -> Recipe:
    """Return the recipe for a client that keeps a part of the model, which may be granted.

    Labels cannot be counted then, and are optimised with the data unless they are granted. Layers
    whose running statistics stay with the client normalise by the batch, as they do in training.
    """
    if problem.unknown_names and recipe.unknown_step_size is None:
        raise missing_part_error(problem.unknown_names, problem.where)
    if any(name not in update.before for name in running_statistic_names(problem.model)):
        recipe = replace(recipe, normalised_by_batch=True)
    if knowledge.labels is None and recipe.label_step_size is None:
        warn(f"{problem.where}: a part of the model stays with the client, so labels are optimised with the data")
        recipe = replace(recipe, label_step_size=recipe.step_size)
    return recipe


def optimise_vector_targets(recipe: Recipe, problem: InversionProblem, update: Update, knowledge: Knowledge) -> Recipe:
    """Return the recipe, by which masks, and several labels or numbers, are optimised unless they are granted.

    No formula counts them in the last layer's update, as those of classes do.
    """
    is_decided = knowledge.labels is not None or recipe.label_step_size is not None
    if problem.goal == "classes" or is_decided:
        return recipe
    shape = (update.num_examples, *(knowledge.input_shape or ()))
    if problem.goal != "masks" and find_output_shape(problem, knowledge, shape)[-1] == 1:
        single = torch.zeros(2, 1)
        if problem.goal == "numbers" or not takes_targets(prediction_loss(problem.loss), single, single):
            return recipe
    if recipe.epochs > 1:
        raise KnowledgeError(
            f"{problem.where}: {_TARGETS[problem.goal]} cannot be recovered by an attack that makes an image for "
            "each local epoch; grant them with adversary.knowledge.labels = true"
        )
    warn(f"{problem.where}: the targets are {_TARGETS[problem.goal]}, so they are optimised with the data")
    return replace(recipe, label_step_size=recipe.step_size)


_TARGETS: Mapping[Goal, str] = {
    "labels": "several labels an example",
    "numbers": "several numbers an example",
    "masks": "masks",
}


def match_mixtures(
    recipe: Recipe, problem: InversionProblem, classes: tuple[int, ...]
) -> tuple[Recipe, InversionProblem]:
    """Return recipe and problem for clients that mix records: the dummy records are mixed, too.

    Labels of classes are probabilities then, and the pairs that were mixed are not known, so labels
    are optimised together with the data, whether or not the records' labels are granted. Targets of
    a regression stay as they are.
    """
    if recipe.label_step_size is None and classes != (1,) and problem.goal != "numbers":
        recipe = replace(recipe, label_step_size=recipe.step_size)
    mixing = [defense for defense in problem.defenses if defense.mixes]
    return recipe, replace(problem, mixing_defenses=mixing)
