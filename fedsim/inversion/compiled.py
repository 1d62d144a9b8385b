"""The objective and its gradients as one compiled graph of the forward and both backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.base.errors import AttackError, FedsimError, first_line
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_tensors import problem_facts, problem_tensors, replace_tensors, tree_shapes

_TOLERANCE = 1e-3
"""Largest difference of the compiled objective from the traced function's, relative to its size (at
least 1)."""

_cache: dict[Any, Callable[..., list[Tensor]]] = {}
"""Graphs by what they were traced from. The numbers of an inversion problem become part of a graph;
its tensors are arguments."""


def compile_objective(
    evaluate: Callable[..., list[Tensor]],
    key: tuple[str, ...],
    problem: InversionProblem,
    target: list[Tensor],
    sample: tuple[dict[str, Tensor], tuple[Tensor, ...]],
) -> Callable[[dict[str, Tensor], tuple[Tensor, ...]], list[Tensor]]:
    """Trace and compile `evaluate` with its problem, for tensors of these shapes.

    The graph of one victim serves all others of the same shapes, because its tensors are arguments.
    For each victim it is compared with `evaluate` at the sample. If the two differ, they are
    compared at two points close to it: at a kink of the network, such as a ReLU's, rounding decides
    which side the sample is on.

    Args:
        evaluate: `(values, iteration_inputs, problem, target) -> tensors`, without control flow
            that depends on values.
        key: tells `evaluate` from other functions, such as the attack's settings.
        problem: whose numbers become constants of the graph.
        target: what gradients are compared with.
        sample: values and iteration inputs to trace with.

    Raises:
        AttackError: the model cannot be traced, or its graph computes something else.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = problem_tensors(problem)

    def evaluate_tensors(
        values: dict[str, Tensor],
        iteration_inputs: tuple[Tensor, ...],
        tensors: dict[str, Any],
        target: list[Tensor],
    ) -> list[Tensor]:
        return evaluate(values, iteration_inputs, replace_tensors(problem, tensors), target)

    def objectives(run: Callable[..., list[Tensor]], seed: int = 0) -> tuple[float, float]:
        """Return the objective of the graph and of `evaluate`, at the sample or close to it."""
        values = _perturb_values(sample[0], seed)
        graph_objective = run(values, sample[1], tensors, target)[0].item()
        return graph_objective, evaluate(values, sample[1], problem, target)[0].item()

    def is_faithful(run: Callable[..., list[Tensor]]) -> bool:
        if _agree(*objectives(run)):
            return True
        return all(_agree(*objectives(run, seed)) for seed in (1, 2))

    arguments = (*sample, tensors, target)
    cache_key = (
        key,
        repr(problem.model),
        problem.loss,
        problem_facts(problem),
        tree_shapes(arguments),
    )
    try:
        faithful = cache_key in _cache and is_faithful(_cache[cache_key])
        if not faithful:  # new, or a model of the same `repr` that computes something else
            graph = make_fx(evaluate_tensors)(*arguments)
            _cache[cache_key] = torch.compile(graph, dynamic=False)
            faithful = is_faithful(_cache[cache_key])
        run = _cache[cache_key]
    except FedsimError:
        raise
    except Exception as error:
        raise AttackError(f"the model cannot be compiled ({first_line(error)}); set compile = false") from error
    if not faithful:
        graph_objective, objective = objectives(run)
        del _cache[cache_key]
        raise AttackError(
            f"the compiled objective is {graph_objective:.6g} where the model gives "
            f"{objective:.6g}: its control flow depends on values, or the compiler errs; "
            "set compile = false"
        )
    return lambda values, iteration_inputs: run(values, iteration_inputs, tensors, target)


def _perturb_values(values: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add Gaussian noise of standard deviation 0.01; return `values` themselves for seed 0."""
    if not seed:
        return values
    rng = torch.Generator().manual_seed(seed)
    perturbed = {}
    for name, value in values.items():
        noise = torch.randn(value.shape, generator=rng).to(value)
        perturbed[name] = (value.detach() + 0.01 * noise).requires_grad_(value.requires_grad)
    return perturbed


def _agree(graph_objective: float, objective: float) -> bool:
    both_nan = math.isnan(graph_objective) and math.isnan(objective)
    return both_nan or abs(graph_objective - objective) <= _TOLERANCE * max(1.0, abs(objective))
