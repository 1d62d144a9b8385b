"""The objective and its gradients as one compiled graph of the forward and both backward passes.

On a GPU it is compiled to a CUDA graph as well, so that its hundreds of kernels are started by one
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsim.base.errors import AttackError, FedsimError, first_line, is_device_failure
from fedsim.interfaces.attack import warn
from fedsim.inversion.descent import Step
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_tensors import problem_facts, problem_tensors, replace_tensors, tree_shapes
from fedsim.inversion.public_fits import hash_records
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import GradientNames, IterationInputs, Restart, objective_and_gradients

_TOLERANCE = 1e-3
"""Largest difference of the compiled objective from the traced function's, relative to its size (at
least 1)."""

_GRADIENT_TOLERANCE = 0.1
"""Largest L2 distance of all compiled gradients from the traced function's, relative to the L2 norm of these;
measured on small networks, 1e-7, and 4e-3 in bfloat16, which rounds otherwise where operations are fused."""

_Graph = Callable[..., list[Tensor]]
"""Compiled `evaluate_tensors`."""

_cache: list[tuple[tuple[Any, ...], _Graph]] = []
"""Graphs with the keys of what they were traced from. The numbers of an inversion problem become part of a graph;
its tensors are arguments."""


def make_compiled_steps(task: InversionTask) -> list[Step]:
    """Return the steps of each restart, whose objective is traced and compiled once."""
    recipe, problem, target = task.recipe, task.problem, task.target
    graphs: dict[GradientNames, Callable[..., list[Tensor]]] = {}

    def evaluate(
        values: dict[str, Tensor],
        iteration_inputs: IterationInputs,
        problem: InversionProblem,
        target: list[Tensor],
        names: GradientNames,
    ) -> list[Tensor]:
        with task.precision_context():
            return objective_and_gradients(recipe, problem, values, iteration_inputs, target, names)

    def evaluate_compiled(restart: Restart, iteration: int) -> list[Tensor]:
        inputs, names = (restart.values(), restart.iteration_inputs(iteration)), restart.gradient_names(iteration)
        if names not in graphs:
            key = (names, task.half_precision, objective_key(recipe, problem, inputs[0], target))
            function = partial(evaluate, names=names)
            graphs[names] = compile_objective(function, key, problem, target, inputs)
        return graphs[names](*inputs)

    return [restart.make_step(partial(evaluate_compiled, restart)) for restart in task.restarts]


def compile_objective(
    evaluate: Callable[..., list[Tensor]],
    key: tuple[Any, ...],
    problem: InversionProblem,
    target: list[Tensor],
    sample: tuple[dict[str, Tensor], tuple[Tensor, ...]],
) -> Callable[[dict[str, Tensor], tuple[Tensor, ...]], list[Tensor]]:
    """Trace and compile `evaluate` with its problem, for tensors of these shapes.

    The graph of one victim serves all others of the same shapes, because its tensors are arguments.
    For each victim its objective and gradients are compared with those of `evaluate` at the sample. If they differ,
    they are compared at two points close to it: at a kink of the network, such as a ReLU's, rounding decides
    which side the sample is on.

    Args:
        evaluate: `(values, iteration_inputs, problem, target) -> tensors`, the objective first, without control flow
            that depends on values.
        key: all that decides what `evaluate` computes but the values of tensors, see `objective_key`.
        problem: whose numbers become constants of the graph, and what is fitted to its auxiliary records.
        sample: values and iteration inputs to trace with.
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

    def outputs(run: _Graph, seed: int = 0, deviation: float = 0.01) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of the graph and of `evaluate`, at the sample or so far from it."""
        values = _perturb_values(sample[0], seed, deviation)
        graph_outputs = run(values, sample[1], tensors, target)
        return graph_outputs, evaluate(values, sample[1], problem, target)

    def is_faithful(run: _Graph) -> bool:
        if not _agree(*outputs(run)) and not all(_agree(*outputs(run, seed)) for seed in (1, 2)):
            return False
        if not uses_cuda_graphs(device):
            return True
        # A CUDA graph is recorded in its second run and repeated from its third run on, so these take values that
        # are far enough from each other to tell their objectives apart.
        return all(_agree(*outputs(run, seed, deviation=1.0)) for seed in (1, 2, 3))

    device = problem.labels.device
    arguments = (*sample, tensors, target)
    try:
        # Models of the same `repr` may compute different things, so several graphs may have this key.
        kept_graphs = [graph for kept_key, graph in _cache if kept_key == key]
        run = next((graph for graph in kept_graphs if is_faithful(graph)), None)
        faithful = run is not None
        if run is None:
            graph = make_fx(evaluate_tensors)(*arguments)
            if uses_cuda_graphs(device):
                run = _compile_to_cuda_graph(graph, is_faithful, problem.where)
            faithful = run is not None
            if run is None:
                run = torch.compile(graph, dynamic=False)
                faithful = is_faithful(run)
            if faithful:
                _cache.append((key, run))
    except FedsimError:
        raise
    except Exception as error:
        cause = _find_cause(error)
        if is_device_failure(cause):
            raise cause from error
        raise AttackError(f"the model cannot be compiled ({first_line(cause)}); set compile = false") from error
    if not faithful:
        graph_outputs, eager_outputs = outputs(run)
        raise AttackError(
            f"the compiled objective is {graph_outputs[0].item():.6g} where the model gives "
            f"{eager_outputs[0].item():.6g}, or its gradients are off: its control flow depends on values, or the "
            "compiler errs; set compile = false"
        )
    return lambda values, iteration_inputs: run(values, iteration_inputs, tensors, target)


def uses_cuda_graphs(device: torch.device) -> bool:
    """Return whether an objective on this device is compiled to a CUDA graph."""
    return device.type == "cuda"


def _compile_to_cuda_graph(graph: torch.nn.Module, is_faithful: Callable[[_Graph], bool], where: str) -> _Graph | None:
    """Compile a traced function to a CUDA graph; return None, with a warning, if that fails or computes otherwise."""
    compiled = torch.compile(graph, dynamic=False, mode="reduce-overhead")

    def run(*arguments: Any) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        # The next run overwrites these outputs, of which curves and gradients of alpha live longer.
        return [output.clone() for output in compiled(*arguments)]

    try:
        if is_faithful(run):
            return run
        cause = "it gave other values"
    except Exception as error:
        if is_device_failure(_find_cause(error)):
            raise _find_cause(error) from error
        cause = first_line(_find_cause(error))
    warn(f"{where}: compiled without a CUDA graph ({cause}), so an iteration takes longer")
    return None


def _find_cause(error: Exception) -> Exception:
    """Return what the compiler failed at; the first line of its own error names only its backend."""
    cause: Exception = getattr(error, "inner_exception", error)
    return cause


def _perturb_values(values: dict[str, Tensor], seed: int, deviation: float) -> dict[str, Tensor]:
    """Add Gaussian noise of this standard deviation; return `values` themselves for seed 0."""
    if not seed:
        return values
    rng = torch.Generator().manual_seed(seed)
    perturbed = {}
    for name, value in values.items():
        noise = torch.randn(value.shape, generator=rng).to(value)
        perturbed[name] = (value.detach() + deviation * noise).requires_grad_(value.requires_grad)
    return perturbed


def _agree(graph_outputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether numbers agree, such as the objective, and all tensors together, such as the gradients."""
    squared_distance = squared_norm = 0.0
    for graph_output, output in zip(graph_outputs, outputs, strict=True):
        if not output.ndim:
            if not _numbers_agree(graph_output.item(), output.item()):
                return False
        elif not torch.equal(graph_output.isnan(), output.isnan()):
            return False
        else:
            squared_distance += (graph_output - output).nan_to_num().square().sum().item()
            squared_norm += output.nan_to_num().square().sum().item()
    return squared_distance <= _GRADIENT_TOLERANCE**2 * squared_norm


def _numbers_agree(graph_number: float, number: float) -> bool:
    both_nan = math.isnan(graph_number) and math.isnan(number)
    return both_nan or abs(graph_number - number) <= _TOLERANCE * max(1.0, abs(number))


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
        (recipe.label_step_size is None, recipe.smoothing, recipe.smoothing_radius, recipe.relu_width),
        (repr(problem.model), problem.loss, type(problem.scaling), problem_facts(problem)),
        problem.auxiliary and hash_records(problem.auxiliary),  # to which priors are fitted
        tree_shapes((problem_tensors(problem), list(target), dict(values))),
    )
