"""Change a recipe to what a client keeps, mixes or predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fedsim.base.errors import KnowledgeError
from fedsim.base.loss_term import prediction_loss
from fedsim.base.task import Goal, takes_targets
from fedsim.interfaces.attack import Knowledge, warn
from fedsim.inversion.differentiability import find_output_shape
from fedsim.inversion.named_states import missing_part_error, running_statistic_names
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.wire_format import Update


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
