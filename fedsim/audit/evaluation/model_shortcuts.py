"""What saves a CPU time in the gradients of batches, where trials show that a model allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.base.randomness import generator
from fedsim.recording.wire_format import State
from fedsim.training.convolution_products import use_products
from fedsim.training.example_independence import find_mixing_layer
from fedsim.training.settings import LocalTraining

_TRIAL_EXAMPLES = 3
_ROUNDING = 1e-4
"""Largest difference of two gradients that counts as rounding, relative to their norm."""


@dataclass(frozen=True)
class ModelShortcuts:
    """Shortcuts that a model allows.

    Attributes:
        computes_equal_examples_once: each example has an output of its own, so equal ones have equal outputs.
        lays_channels_last: the layout of images with the channels last gives the same gradients.
    """

    computes_equal_examples_once: bool = False
    lays_channels_last: bool = False

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Return inputs in the layout that convolutions take fastest."""
        return inputs.contiguous(memory_format=torch.channels_last) if self.lays_channels_last else inputs


def find_shortcuts(model: nn.Module, settings: LocalTraining | None, inputs: Tensor) -> ModelShortcuts:
    """Try which shortcuts a model allows; the model is changed accordingly, but for its parameters' values.

    Args:
        model: in the modes in which it is used.
        settings: how it is trained; None where that is not known, and then there are no shortcuts.
        inputs: `example ...` in model units, of which the shape, the range and the device count.
    """
    if settings is None or inputs.device.type != "cpu":
        return ModelShortcuts()
    # Two random batches that share their last example.
    rng, low = generator("probe"), inputs.min()
    trials = torch.rand((2, _TRIAL_EXAMPLES, *inputs.shape[1:]), generator=rng)
    first, second = low + (inputs.max() - low) * trials
    second[-1] = first[-1]
    try:
        gradients = _sum_gradients(model, first)
        # Where all are zero, as those of a last layer that begins with zeros, no trial shows anything.
        if not any(bool(gradient.any()) for gradient in gradients):
            return ModelShortcuts()
        is_independent = find_mixing_layer(model, settings, first, second) is None
        lays_channels_last = first.ndim == 4 and _lay_channels_last(model, first, gradients)
    except Exception:  # a foreign model may refuse such batches
        return ModelShortcuts()
    return ModelShortcuts(is_independent, lays_channels_last)


def _lay_channels_last(model: nn.Module, images: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Lay out a model with the channels last, unless it then raises or gives other gradients."""
    model.to(memory_format=torch.channels_last)
    is_same = _give_gradients(model, images.contiguous(memory_format=torch.channels_last), gradients)
    if not is_same:
        model.to(memory_format=torch.contiguous_format)
    return is_same


def _give_gradients(model: nn.Module, inputs: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether a model now gives these gradients of `_sum_gradients`."""
    try:
        return _agree(gradients, _sum_gradients(model, inputs))
    except Exception:  # such as of `view`, which takes one layout only; a foreign model may raise anything
        return False


def _sum_gradients(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the sum of squares of the outputs."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        objective = model(images).square().sum()
    return torch.autograd.grad(objective, parameters, materialize_grads=True)


def _agree(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether gradients as a whole agree; that of a bias before BatchNorm is all rounding."""
    pairs = zip(gradients, others, strict=True)
    differences = [(gradient - other).norm() for gradient, other in pairs]
    norms = [gradient.norm() for gradient in gradients]
    return bool(torch.stack(differences).norm() <= _ROUNDING * torch.stack(norms).norm())


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
