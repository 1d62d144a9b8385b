"""Gradients of a model at several points in one call, of which scores need two numbers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.recording.wire_format import State
from fedsim.training.convolution_products import use_products


def measure_gradients(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    state: State,
    are_states_stacked: bool,
    input_sets: Sequence[Tensor],
    labels: Tensor,
    directions: Mapping[str, Tensor],
) -> Tensor:
    """Compute gradients of the loss at several states, or of several inputs, and compare them with a direction.

    Args:
        model: lends its architecture, in the modes in which it is used; it has no buffers.
        are_states_stacked: whether each tensor of `state` has a first axis of points; otherwise all share it.
        input_sets: `example ...` each; one for all points or one for each.
        labels: `example`, of all inputs.
        directions: the direction by name of each trained parameter, by `flatten_gradient`, in double precision.

    Returns:
        `point 2`, the product of each gradient with the direction, and its square.
    """

    def compare(state: State, inputs: Tensor) -> Tensor:
        def compute_loss(trained: State) -> Tensor:
            outputs = functional_call(model, {**state, **trained}, (inputs,))
            return loss(outputs, labels)

        gradients = grad(compute_loss)({name: state[name] for name in directions})
        numbers = []
        for name, direction in directions.items():
            values = flatten_gradient(gradients[name]).double()
            numbers.append(torch.stack([values @ direction, values @ values]))
        return torch.stack(numbers).sum(0)

    # What all points have in common is computed with once.
    inputs, input_axis = (input_sets[0], None) if len(input_sets) == 1 else (torch.stack(list(input_sets)), 0)
    with use_products(inputs.device):
        compared: Tensor = vmap(compare, (0 if are_states_stacked else None, input_axis))(state, inputs)
    return compared


def flatten_gradient(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor, channels last: gradients that are laid out so need not be copied."""
    return (tensor.movedim(1, -1) if tensor.ndim == 4 else tensor).flatten()
