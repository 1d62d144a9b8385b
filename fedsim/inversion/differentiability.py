"""Checks that the distance can be differentiated in the dummy data, and names the layer if not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.base.errors import AttackError, first_line, is_device_failure
from fedsim.base.module_hooks import hook_outputs
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.shared_setup import ask_once

LayerCall = tuple[str, nn.Module, tuple[Tensor, ...], Tensor]
"""A layer's name, the layer, its inputs and its output."""


@torch.no_grad()
def check_inputs(problem: InversionProblem, dummy: Tensor) -> Tensor:
    """Check that the model takes data of this shape, and return its outputs."""
    try:
        return problem.outputs(problem.before, dummy)
    except (RuntimeError, ValueError, IndexError) as error:
        if is_device_failure(error):
            raise
        raise AttackError(
            f"{problem.where}: the model does not take inputs of shape {tuple(dummy.shape)} "
            f"({first_line(error)}); check input_shape, and that the model is the federation's"
        ) from error


def find_output_shape(problem: InversionProblem, knowledge: Knowledge, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the outputs for one of the examples in data of a shape."""

    def compute_shape() -> torch.Size:
        return check_inputs(problem, problem.before[0].new_zeros(shape)).shape[1:]

    return tuple(ask_once(f"outputs for {shape}", problem.model, knowledge, compute_shape))


def check_differentiability(
    problem: InversionProblem,
    values: Mapping[str, Tensor],
    labels: Tensor,
    distance_of: Callable[[dict[str, Tensor]], Tensor],
) -> None:
    """Check that the distance's gradient in the dummy data is finite and not zero.

    The backward pass goes to all leaves, because it raises if a function can be differentiated only
    once; `torch.autograd.grad` would skip that function and return a part of the gradient.

    Args:
        values: what is optimised, at its start; `dummy` are the dummy data.
        distance_of: returns the distance for given values, without priors.
    """
    leaves = {name: value.detach().clone().requires_grad_(True) for name, value in values.items()}
    dummy = values["dummy"].detach()
    try:
        distance = distance_of(leaves)
        if distance.requires_grad:
            distance.backward()
    except (RuntimeError, IndexError) as error:
        if is_device_failure(error):
            raise
        cause = _explain_failure(problem, dummy, labels, error)
        raise AttackError(f"{problem.where}: {cause}") from error
    if not distance.isfinite():
        return
    gradient = leaves["dummy"].grad
    if gradient is None or not gradient.any():
        raise AttackError(f"{problem.where}: {_explain_zero_gradient(problem, dummy)}")
    if not gradient.isfinite().all():
        cause = "no layer is to blame"
        for call in _layer_calls(problem, dummy):
            if _second_derivative(call) == "infinite":
                cause = f"layer {_describe_layer(call)} has no finite second derivative there"
                break
        raise AttackError(
            f"{problem.where}: the gradient of the distance in the dummy data is NaN or infinite: "
            f"{cause}; attack another model"
        )


def _explain_failure(problem: InversionProblem, dummy: Tensor, labels: Tensor, error: Exception) -> str:
    outputs = problem.outputs(problem.before, dummy)
    try:
        problem.loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as failure:
        return (
            f"the loss does not take outputs of shape {tuple(outputs.shape)} with the labels "
            f"({first_line(failure)}); check the loss and the labels"
        )
    for call in _layer_calls(problem, dummy):
        if _second_derivative(call) == "none":
            return (
                f"layer {_describe_layer(call)} cannot be differentiated twice "
                f"({first_line(error)}), as matching gradients must; attack a model without it"
            )
    return f"the objective cannot be differentiated ({first_line(error)}); attack another model"


def _explain_zero_gradient(problem: InversionProblem, dummy: Tensor) -> str:
    start = dummy.detach().requires_grad_(True)
    for call in _layer_calls(problem, start):
        if not _depends_on(call[3], start):
            return (
                f"the output of layer {_describe_layer(call)} does not change with the dummy data "
                "(its gradient is exactly zero), so that gradients say nothing about them; "
                "attack a model without it, or one in which it is not dead"
            )
    return (
        "the gradient of the distance in the dummy data is exactly zero, though the model's "
        "outputs depend on them: its gradients do not, or they are too far from the update for "
        "this distance; choose another attack"
    )


def _depends_on(output: Tensor, start: Tensor) -> bool:
    if not output.requires_grad:
        return False
    weights = _output_weights(output)
    (gradient,) = torch.autograd.grad(output, start, weights, retain_graph=True, materialize_grads=True)
    return bool(gradient.any())


def _layer_calls(problem: InversionProblem, dummy: Tensor) -> list[LayerCall]:
    """Return the layers that turn tensors into a tensor, in the order in which they end."""
    calls: list[LayerCall] = []

    def call_recorder(name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def record(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            tensors = tuple(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
            if len(tensors) < len(inputs):
                return
            if isinstance(output, Tensor) and output.is_floating_point():
                calls.append((name, module, tensors, output))

        return record

    with ExitStack() as hooks:
        for name, module in problem.model.named_modules():
            hooks.enter_context(hook_outputs(module, call_recorder(name)))
        problem.outputs(problem.before, dummy)
    return calls


def _second_derivative(call: LayerCall) -> str:
    """Return whether a layer by itself has a second derivative: `none`, `infinite` or `fine`."""
    _, module, inputs, _ = call
    starts = [x.detach().requires_grad_(True) for x in inputs]
    parameters = {}
    for name, parameter in module.named_parameters():
        parameters[name] = parameter.detach().requires_grad_(True)
    try:
        output = functional_call(module, parameters, tuple(starts))
        weights = _output_weights(output).requires_grad_(True)
        leaves = [*starts, *parameters.values()]
        gradients = torch.autograd.grad(output, leaves, weights, create_graph=True, materialize_grads=True)
        squares = [gradient.square().sum() for gradient in gradients if gradient.requires_grad]
        if squares:
            torch.stack(squares).sum().backward()
    except RuntimeError:
        return "none"
    finite = all(x.grad is None or bool(x.grad.isfinite().all()) for x in starts)
    return "fine" if finite else "infinite"


def _output_weights(output: Tensor) -> Tensor:
    """Return random weights of a layer's outputs.

    A sum with equal weights would be constant behind a softmax.
    """
    return torch.randn(output.shape, generator=generator("probe")).to(output)


def _describe_layer(call: LayerCall) -> str:
    name, module, *_ = call
    return f"'{name}' ({type(module).__name__})" if name else f"({type(module).__name__})"
