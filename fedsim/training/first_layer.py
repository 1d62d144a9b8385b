"""Find the linear layer that takes a client's inputs directly, so that its update combines them."""

from __future__ import annotations

from collections.abc import Callable
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


def find_first_layer(model: nn.Module, inputs: Tensor) -> str | None:
    """Return the weight's name of the first linear layer whose input is the flattened inputs.

    `model` is run as it is and in training mode: anything before the layer (BatchNorm, a
    convolution, dropout, any function) changes the layer's input. The weight must be a parameter of
    its own, neither shared nor computed from others, and the outputs must depend on it through this
    layer alone.

    Args:
        inputs: `example ...`, any values, random ones for instance.

    Returns:
        None without such a layer.
    """
    name = _first_layer(model, inputs)
    if name is None or _first_layer(deepcopy(model).train(), inputs) != name:
        return None
    return name if _layer_gradients(model, name, inputs).weight_is_used_once else None


def is_bias_used_once(model: nn.Module, weight: str, inputs: Tensor) -> bool:
    """Tell whether the outputs depend on the bias of a first linear layer through this layer alone.

    Args:
        model: the network.
        weight: name of the layer's weight, see `find_first_layer`.
        inputs: `example ...`, any values, random ones for instance.
    """
    return _layer_gradients(model, weight, inputs).bias_is_used_once


@dataclass(frozen=True)
class _LayerGradients:
    """Gradients of a first linear layer W x + c on `example input`.

    Where parameters are used once, these are D^T X and D^T 1, with a row of D for each example.
    """

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def weight_is_used_once(self) -> bool:
        """Return whether the gradient of W combines the inputs alone."""
        return _is_small(self.weight - self._errors @ self.inputs, self.weight)

    @property
    def bias_is_used_once(self) -> bool:
        """Return whether the gradient of c sums the examples' parts of that of W."""
        if self.bias is None or self.inputs.shape[1] < len(self.inputs):
            return True  # of fewer features than examples, the errors are not determined
        return _is_small(self.bias - self._errors.sum(1), self.bias)

    @property
    def _errors(self) -> Tensor:
        """Return D^T, `output example`, by least squares."""
        errors: Tensor = self.weight @ torch.linalg.pinv(self.inputs)
        return errors


def _is_small(difference: Tensor, value: Tensor) -> bool:
    return bool(difference.norm() <= USE_TOLERANCE * value.norm())


def _layer_gradients(model: nn.Module, weight: str, inputs: Tensor) -> _LayerGradients:
    """Compute gradients of a random sum of the outputs, and of a loss term, for one or two of `inputs`.

    The network is in evaluation mode.
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
    return _LayerGradients(examples.flatten(1).double().cpu(), doubles[0], doubles[1] if len(doubles) > 1 else None)


def _first_layer(model: nn.Module, inputs: Tensor) -> str | None:
    calls: list[tuple[nn.Linear, Tensor]] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, arguments[0].detach()))

    linear_layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [hook_inputs(layer, record) for layer in linear_layers]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
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
    """Tell whether only the positive part of a layer's output is used, as by a ReLU after it.

    A copy of `model`, with other weights and running statistics, is run with and without the
    negative part.

    Args:
        layer: name of the layer.
        inputs: `example ...`, any values, random ones for instance.
    """
    model, rng = deepcopy(model), generator("rectified")
    # An untrained BatchNorm layer changes nothing and would go unnoticed.
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=rng).to(tensor))

    def outputs_where(change: Callable[[Tensor], Tensor]) -> Tensor:
        hook = model.get_submodule(layer).register_forward_hook(lambda _, inputs, output: change(output))
        try:
            outputs: Tensor = model(inputs)
        finally:
            hook.remove()
        return outputs

    unchanged, silenced = (
        outputs_where(lambda output: output),
        outputs_where(lambda output: -output.abs()),
    )
    positive_part = outputs_where(lambda output: output.clamp_min(0))
    return torch.equal(unchanged, positive_part) and not torch.equal(unchanged, silenced)
