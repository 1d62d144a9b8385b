"""Replace the features from which the gradient of a model's last linear layer is computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.module_hooks import hook_inputs, hook_outputs
from fedsim.recording.wire_format import State
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes

Replace = Callable[[Tensor, Tensor], Tensor]
"""`(features, inputs) -> features`; returns the same tensor where nothing is to be replaced."""


def find_last_linear(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return the name and the linear layer whose weights are the last trained matrix of `model`.

    The names and shapes of a gradient alone determine the same layer. None where that matrix
    belongs to another kind of layer, or there is no matrix.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim == 2]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, layer in layers:
        if matrices and layer.weight is matrices[-1]:
            return name, layer
    return None


def check_representation(model: nn.Module, name: str) -> None:
    """Check that a trained layer lies before the last linear one, whose inputs are the representation."""
    named_layer = find_last_linear(model)
    if named_layer is None:
        raise ConfigError(
            f"algorithm: '{name}' compares representations, which enter the last linear layer, and the last matrix of "
            "the model belongs to no such layer; choose another model or algorithm"
        )
    last_parameters = {id(parameter) for parameter in named_layer[1].parameters()}
    if all(id(parameter) in last_parameters for parameter in model.parameters() if parameter.requires_grad):
        raise ConfigError(
            f"algorithm: '{name}' compares representations, and no trained layer of the model lies before the last "
            "linear one; choose another model or algorithm"
        )


def forward_with_features(
    model: nn.Module, inputs: Tensor, compute: Callable[[nn.Module, Tensor], Tensor] = forward
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `model` and the features that enter its last linear layer.

    Args:
        inputs: `example ...`.
    """
    named_layer = find_last_linear(model)
    assert named_layer is not None
    name, layer = named_layer
    captured: list[Tensor] = []
    with hook_inputs(layer, lambda _, arguments: captured.append(arguments[0])):
        outputs = compute(model, inputs)
    if len(captured) != 1 or captured[0].ndim != 2:
        raise RunError(
            f"algorithm: representations are what enters '{name}', once and as `example feature`, and this model gives "
            f"it {[tuple(features.shape) for features in captured]}; choose another model or algorithm"
        )
    return outputs, captured[0]


def make_representation(network: nn.Module, state: State) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the features of inputs by a fixed model, in evaluation mode."""
    fixed_network = deepcopy(network)
    load_state(fixed_network, state)
    set_evaluation_modes(fixed_network, state)

    @torch.no_grad()
    def represent(inputs: Tensor) -> Tensor:
        return forward_with_features(fixed_network, inputs)[1]

    return represent


def outputs_with_features(model: nn.Module, inputs: Tensor, replace: Replace) -> Tensor:
    """Compute outputs of `model`, with features x' in the gradient of its last linear layer.

    The layer returns W x + b as before. In the backward pass W is a constant in the term with x,
    and x' a constant in the term with W, so that the gradient of W is computed from x', and all
    others from x.

    Args:
        inputs: `example ...`, real numbers.
        replace: returns x' for x and a copy of the inputs, by which x can be differentiated. The gradients that it
            leaves in the parameters of `model` are dropped.
    """
    named_layer = find_last_linear(model)
    assert named_layer is not None
    name, last = named_layer
    if not inputs.is_floating_point():
        raise RunError("defense: features are to be replaced, but the inputs are integers and have no derivative")
    # The model computes with a copy of what `replace` is handed, which may write to that or differentiate by it.
    inputs_for_replace = inputs.detach().clone().requires_grad_(True)
    inputs, used_layers = inputs_for_replace.clone(), list[nn.Module]()

    def replace_output(layer: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        if last in used_layers:
            raise RunError(f"defense: features of '{name}' are to be replaced, but a linear layer is used after it")
        used_layers.append(layer)
        if layer is not last:
            return output
        features = arguments[0]
        if features.ndim != 2:
            raise RunError(
                f"defense: features of '{name}' are to be replaced, expected `example feature`, "
                f"but it is given a tensor of shape {tuple(features.shape)}"
            )
        replaced = replace(features, inputs_for_replace)
        # `features.backward()`, as in code that prunes features by their derivatives, puts gradients here, too.
        for parameter in model.parameters():
            parameter.grad = None
        return _output_with_features(last, features, replaced, output)

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                hooks.enter_context(hook_outputs(layer, replace_output))
        outputs = forward(model, inputs)
    if last not in used_layers:
        raise RunError(f"defense: features of '{name}' are to be replaced, but the model does not use this layer")
    return outputs


def _output_with_features(layer: nn.Linear, features: Tensor, replaced: Tensor, output: Tensor) -> Tensor:
    """Return `output`, with the gradient of the weights computed from `replaced`."""
    if replaced is features:
        return output
    weight_term = linear(replaced.detach(), layer.weight)
    # The difference is zero; it only adds the gradient of the weights.
    return linear(features, layer.weight.detach(), layer.bias) + (weight_term - weight_term.detach())
