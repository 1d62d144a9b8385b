"""Tensors of an inversion problem, and the same problem with other tensors.

So a computation that is traced or batched for one victim serves others of the same shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.problem import InversionProblem

_SCALING_FIELDS = [item.name for item in dataclasses.fields(InputScaling)]


def problem_tensors(problem: InversionProblem) -> dict[str, Any]:
    """Return every tensor of the problem, by attribute, in lists and dicts."""
    tensors: dict[str, Any] = {}
    if problem.sent_gradient is not None:
        tensors["sent_gradient"] = list(problem.sent_gradient)
    if problem.sent_pseudo_gradient is not None:
        tensors["sent_pseudo_gradient"] = list(problem.sent_pseudo_gradient)
    return {
        "before": list(problem.before),
        "after": list(problem.after),
        **tensors,
        "buffers": dict(problem.buffers),
        "returned_buffers": dict(problem.returned_buffers),
        "labels": problem.labels,
        "scaling": [getattr(problem.scaling, name) for name in _SCALING_FIELDS],
    }


def replace_tensors(problem: InversionProblem, tensors: dict[str, Any]) -> InversionProblem:
    """Return the problem with other tensors in place of its own.

    Args:
        tensors: in the form of `problem_tensors`.
    """
    scaling_tensors = dict(zip(_SCALING_FIELDS, tensors["scaling"], strict=True))
    scaling = problem.scaling
    unchanged = [tensor is getattr(scaling, name) for name, tensor in scaling_tensors.items()]
    if not all(unchanged):  # the same scaling keeps what it has cached
        scaling = dataclasses.replace(scaling, **scaling_tensors)
    return dataclasses.replace(
        problem,
        before=tensors["before"],
        after=tensors["after"],
        sent_gradient=tensors.get("sent_gradient", problem.sent_gradient),
        sent_pseudo_gradient=tensors.get("sent_pseudo_gradient", problem.sent_pseudo_gradient),
        buffers=tensors["buffers"],
        returned_buffers=tensors["returned_buffers"],
        labels=tensors["labels"],
        scaling=scaling,
    )


def problem_facts(problem: InversionProblem) -> tuple[Any, ...]:
    """Return the facts of a problem that are no tensors, besides its model and loss."""
    return (
        repr(problem.defenses),
        repr(problem.mixing_defenses),
        problem.parameter_names,
        problem.smooth_dimensions,
        problem.num_examples,
        problem.num_clients,
        problem.learning_rate,
        problem.local_epochs,
        problem.local_steps,
        problem.batch_size,
        problem.optimizer,
        problem.momentum,
        problem.weight_decay,
        problem.proximal_mu,
        problem.uses_batch_statistics,
    )


def tree_shapes(tree: Any) -> tuple[Any, ...]:
    """Return names and order of the tensors in nested lists and dicts, and the shape, type and device of each."""
    from torch.utils._pytree import tree_flatten

    leaves, outline = tree_flatten(tree)
    return outline, *((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves)
