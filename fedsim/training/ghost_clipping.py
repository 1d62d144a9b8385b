"""The sum of clipped gradients of single examples, without computing any of these gradients.

In a linear layer the gradient of one example is the outer product of the layer's input and the
gradient by its output. So its norm is the product of their norms, and the sum of gradients times
clipping factors is one product of two matrices. In a convolution, whose weights are few, the
gradients of examples are computed. So a step costs little more than one without clipping, where
gradients of all weights for each example are mostly time in memory. Opacus' own ghost clipping
takes 1.6 to 2.4 times as long (`benchmarks/dp_sgd_step.py`), because it goes back twice.

References:
    [Goodfellow2015] for norms of linear layers; [Bu2023] for sums from one backward pass. Differs:
    convolutions have their gradients computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedsim.base.task import Loss

_MAX_CONVOLUTION_NUMBERS = 1 << 26
"""Most numbers in the gradients of all examples for one convolution."""
ClippingFactors = Callable[[Tensor], Tensor]
"""Computes clipping factors, `tensor example`, from the L2 norms of gradients in the same shape."""


def can_clip(model: nn.Module) -> bool:
    """Return whether clipped sums can be computed for `model`.

    It has to be a sequence of linear layers, convolutions, and layers of PyTorch without weights,
    all of them trained: only then is it known that its weights are used by their layers alone. A
    hook may change what a layer computes.
    """
    layers = list(_innermost_layers(model)) if type(model) is nn.Sequential else []
    return (
        any(_has_known_weights(layer) for layer in layers)
        and not any(has_hooks(layer) for layer in model.modules())
        and len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
        and all(parameter.requires_grad for parameter in model.parameters())
        and all(_has_known_weights(layer) or _has_no_weights(layer) for layer in layers)
    )


def has_hooks(layer: nn.Module) -> bool:
    """Return whether functions are called when `layer` or its gradient is computed, which may change either."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def clipped_sum(
    model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss, factors: ClippingFactors
) -> tuple[dict[str, Tensor], Tensor] | None:
    """Compute the sum of the examples' gradients times their clipping factors, and the losses.

    Args:
        model: one for which `can_clip` holds.
        inputs: `example ...` in model units.
        labels: `example`.
        factors: computes clipping factors from the norms of each example's gradient by each
            parameter, in their order.

    Returns:
        The sums by name of parameter, and the losses, `example`; None where the input of a layer
        has an unexpected shape, or its input or output was changed in place.
    """
    # Run the model layer by layer, keeping the inputs and outputs of those with weights.
    calls: list[_LayerCall] = []
    outputs = inputs
    for layer in _innermost_layers(model):
        layer_inputs, outputs = outputs, layer(outputs)
        if _has_known_weights(layer):
            versions = layer_inputs._version, outputs._version
            calls.append(_LayerCall(layer, layer_inputs.detach(), outputs, *versions))
    if not all(call.is_known for call in calls):
        return None
    # One backward pass gives the gradients by all outputs.
    losses = loss(outputs, labels, reduction="none")
    output_gradients = torch.autograd.grad(losses.sum(), [call.outputs for call in calls])
    # Norms give the clipping factors, and these the sums.
    terms: list[_ParameterTerm] = []
    for call, output_gradient in zip(calls, output_gradients, strict=True):
        terms += call.terms(output_gradient)
    clipping_factors = factors(torch.stack([term.norms for term in terms]))
    names = [name for name, _ in model.named_parameters()]
    sums: dict[str, Tensor] = {}
    for name, term, parameter_factors in zip(names, terms, clipping_factors, strict=True):
        sums[name] = term.weighted_sum(parameter_factors)
    return sums, losses.detach()


def _innermost_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a sequence, and of sequences in it, in the order in which they are called."""
    for layer in model._modules.values():  # `children` yields a layer that is called twice only once
        assert layer is not None
        if type(layer) is nn.Sequential:
            yield from _innermost_layers(layer)
        else:
            yield layer


def _has_known_weights(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _has_no_weights(layer: nn.Module) -> bool:
    """Return whether a layer is one of PyTorch's own, without weights and without layers in it."""
    from_torch = type(layer).__module__.startswith("torch.nn.modules.")
    return from_torch and not any(True for _ in layer.children()) and not layer.state_dict()


@dataclass(frozen=True)
class _ParameterTerm:
    """Norms of all examples' gradients by one parameter, and their sum with given factors."""

    norms: Tensor
    weighted_sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _LayerCall:
    """Layer with its inputs and outputs, and how often both had been changed in place by then."""

    layer: nn.Linear | nn.Conv2d
    inputs: Tensor
    outputs: Tensor
    input_version: int
    output_version: int

    @property
    def is_known(self) -> bool:
        """Return whether `terms` holds: the shape is known and nothing was changed in place."""
        versions = self.inputs._version, self.outputs._version
        if versions != (self.input_version, self.output_version):
            return False
        if not isinstance(self.layer, nn.Conv2d):
            return self.inputs.ndim == 2
        numbers = len(self.inputs) * self.layer.weight.numel()
        return self.inputs.ndim == 4 and numbers <= _MAX_CONVOLUTION_NUMBERS

    def terms(self, output_gradient: Tensor) -> list[_ParameterTerm]:
        """Return the terms of weight and bias, from the gradient by the outputs, `example ...`."""
        if isinstance(self.layer, nn.Conv2d):
            return _convolution_terms(self.layer, self.inputs, output_gradient)
        return _linear_terms(self.layer, self.inputs, output_gradient)


def _linear_terms(layer: nn.Linear, inputs: Tensor, output_gradient: Tensor) -> list[_ParameterTerm]:
    norms = output_gradient.norm(dim=1)
    weight = _ParameterTerm(
        norms=inputs.norm(dim=1) * norms,
        weighted_sum=lambda factors: (factors[:, None] * output_gradient).mT @ inputs,
    )
    if layer.bias is None:
        return [weight]
    return [weight, _ParameterTerm(norms, lambda factors: factors @ output_gradient)]


def _convolution_terms(layer: nn.Conv2d, inputs: Tensor, output_gradient: Tensor) -> list[_ParameterTerm]:
    patches = unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    flat = output_gradient.flatten(2)
    weight_gradients, bias_gradients = torch.bmm(flat, patches.mT).flatten(1), flat.sum(2)
    weight = _ParameterTerm(
        norms=weight_gradients.norm(dim=1),
        weighted_sum=lambda factors: (factors @ weight_gradients).view(layer.weight.shape),
    )
    if layer.bias is None:
        return [weight]
    return [
        weight,
        _ParameterTerm(bias_gradients.norm(dim=1), lambda factors: factors @ bias_gradients),
    ]
