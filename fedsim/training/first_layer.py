"""Find the linear layer that takes a client's inputs directly, so that its update combines them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.base.loss_term import loss_term_of
from fedsim.base.module_hooks import hook_inputs
from fedsim.base.randomness import generator

USE_TOLERANCE = 5e-3
"""Largest part of a gradient that counts as rounding; networks that compute in bfloat16 round 2e-3 of it."""


@dataclass(frozen=True)
class InputLayer:
    """First linear layer of a network, whose input is the flattened inputs.

    Attributes:
        weight: name of its weight.
        bias_is_used_once: whether the outputs depend on its bias, if there is one, through this layer alone.
    """

    weight: str
    bias_is_used_once: bool


def find_first_layer(model: nn.Module, inputs: Tensor) -> InputLayer | None:
    """Return the first linear layer whose input is the flattened inputs, None without such a layer.

    `model` is run as it is and in training mode: anything before the layer (BatchNorm, a
    convolution, dropout, any function) changes the layer's input. The weight must be a parameter of
    its own, neither shared nor computed from others, and the outputs must depend on it through this
    layer alone.

    Args:
        inputs: `example ...`, any values, random ones for instance.
    """
    name = _find_weight(model, inputs)
    if name is None or _find_weight(deepcopy(model).train(), inputs) != name:
        return None
    rows, weight_gradient, bias_gradient = _layer_gradients(model, name, inputs)
    # Where W and c of W x + c are used once, their gradients are D^T X and D^T 1, with a row of D for each example.
    errors = weight_gradient @ torch.linalg.pinv(rows)
    if not _is_small(weight_gradient - errors @ rows, weight_gradient):
        return None
    # Of fewer features than examples, the errors are not determined.
    if bias_gradient is None or rows.shape[1] < len(rows):
        return InputLayer(name, True)
    return InputLayer(name, _is_small(bias_gradient - errors.sum(1), bias_gradient))


def _is_small(difference: Tensor, value: Tensor) -> bool:
    return bool(difference.norm() <= USE_TOLERANCE * value.norm())


def _layer_gradients(model: nn.Module, weight: str, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one or two of `inputs`, and the gradients of a random sum of their outputs plus a loss term.

    These are of the weight and of the bias, if there is one. The network is in evaluation mode.
    """
    model, rng = deepcopy(model).eval(), generator("uses of a layer")
    examples = inputs[:2].detach()  # not random ones: a network may look up some columns in a table
    layer = model.get_submodule(weight.rpartition(".")[0])
    assert isinstance(layer, nn.Linear)
    parameters = [parameter.requires_grad_() for parameter in (layer.weight, layer.bias) if parameter is not None]
    with torch.enable_grad():
        outputs: Tensor = model(examples)
        total = (outputs * torch.randn(outputs.shape, generator=rng).to(outputs)).sum()
        if (term := loss_term_of(outputs)) is not None:  # which the network adds to the loss
            total = total + term.sum()
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
    doubles = [gradient.double().cpu() for gradient in gradients]
    return examples.flatten(1).double().cpu(), doubles[0], doubles[1] if len(doubles) > 1 else None


def _find_weight(model: nn.Module, inputs: Tensor) -> str | None:
    calls: list[tuple[nn.Linear, Tensor]] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, arguments[0].detach()))

    with ExitStack() as hooks, torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                hooks.enter_context(hook_inputs(layer, record))
        model(inputs)
    parameters = list(model.named_parameters(remove_duplicate=False))
    for layer, layer_inputs in calls:
        weight_names = [name for name, parameter in parameters if parameter is layer.weight]
        num_calls = sum(called_layer is layer for called_layer, _ in calls)
        if len(weight_names) == num_calls == 1 and torch.equal(layer_inputs, inputs.flatten(1)):
            return weight_names[0]
    return None


_ROUNDING_FACTOR = 10.0
"""Smallest singular value that counts as more than rounding, in roundings of all weights."""
_CLEAR_GAP = 10.0
"""Ratio of the last singular value that counts to the next, from which on the rank is clear."""


def measure_rank(change: Tensor, rounding: float) -> tuple[int, bool]:
    """Return the rank of a first layer's update beyond rounding, and whether it is clear.

    Each step of gradient descent adds a combination of inputs to each row of that layer's weights,
    so the rank is at most the number of distinct examples, however many steps there are.

    Args:
        change: `output input`, what was added to the weight.
        rounding: norm of the rounding that `change` carries.

    Returns:
        The rank, and whether the singular values that count are far above the others; of a full
        rank, it is clear.
    """
    values = torch.linalg.svdvals(change.float())
    counts = values > max(_ROUNDING_FACTOR * rounding, 1e-5 * float(change.norm()))
    rank = int(counts.sum())
    is_clear = rank in (0, len(values)) or bool(values[rank - 1] > _CLEAR_GAP * values[rank])
    return rank, is_clear


@torch.no_grad()
def is_rectified(model: nn.Module, layer: str, inputs: Tensor) -> bool:
    """Return whether only the positive part of a layer's output is used, as by a ReLU after it.

    A copy of `model`, with other weights and running statistics, is run with and without the
    negative part.

    Args:
        inputs: `example ...`, any values, random ones for instance.
    """
    model, rng = deepcopy(model), generator("rectified")
    # An untrained BatchNorm layer changes nothing and would go unnoticed.
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=rng).to(tensor))

    def compute_outputs_with(change: Callable[[Tensor], Tensor]) -> Tensor:
        with model.get_submodule(layer).register_forward_hook(lambda _, inputs, output: change(output)):
            outputs: Tensor = model(inputs)
        return outputs

    unchanged, silenced = (
        compute_outputs_with(lambda output: output),
        compute_outputs_with(lambda output: -output.abs()),
    )
    positive_part = compute_outputs_with(lambda output: output.clamp_min(0))
    return torch.equal(unchanged, positive_part) and not torch.equal(unchanged, silenced)
