"""What tells two objectives apart, but for the values of their tensors.

One key decides which victims are computed in one call, and which of them a compiled graph serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_tensors import problem_facts, problem_tensors, tree_shapes
from fedsim.inversion.public_fits import hash_records
from fedsim.inversion.recipe import Recipe


def objective_key(
    recipe: Recipe, problem: InversionProblem, values: Mapping[str, Tensor], target: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Return what has to be equal where one computation of `objective_terms` serves several victims.

    Keys are compared by `==`. They have no hash, because parts of a recipe may have none. Models count as equal if they
    are described alike, which says nothing of what they compute, so whoever shares a computation compares its results
    with those of the victim alone.
    """
    return (
        (recipe.update_model, recipe.distance, tuple(recipe.priors), recipe.parametrisation),
        (recipe.label_step_size is None, recipe.smoothing, recipe.smoothing_radius),
        (repr(problem.model), problem.loss, type(problem.scaling), problem_facts(problem)),
        problem.auxiliary and hash_records(problem.auxiliary),  # to which priors are fitted
        tree_shapes((problem_tensors(problem), list(target), dict(values))),
    )
