"""Checks that a network fits its task, by one forward pass and one double backward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from fedsim.base.errors import ConfigError, describe_error
from fedsim.base.loss_term import add_model_term, describe_undeclared_term
from fedsim.base.machine import total_memory
from fedsim.data import Dataset


def check_network(thing: Any, name: str) -> nn.Module:
    """Check that a model plug-in has built a network, and return it."""
    if not isinstance(thing, nn.Module):
        raise ConfigError(f"model: '{name}' gave a {type(thing).__name__}, expected a torch.nn.Module")
    if complaint := lazy_layer_complaint(thing):
        raise ConfigError(f"model: '{name}' {complaint}")
    for key, parameter in thing.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"model: '{name}' has the parameter '{key}' of {parameter.dtype}, expected real numbers, which alone "
                "are sent; store complex numbers by torch.view_as_real, and integers as a buffer"
            )
    return thing


def lazy_layer_complaint(network: nn.Module) -> str:
    """Return a complaint about lazy layers, which have no size yet, or an empty text."""
    for key, value in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(value):
            owner = type(network.get_submodule(key.rpartition(".")[0])).__name__
            return (
                f"does not say how large '{key}' is, of a {owner}, which takes its size from the first input; name the "
                "sizes, so that weights can be sent before there is one"
            )
    return ""


def redraw_weights(network: nn.Module) -> None:
    """Draw new weights for all layers, from torch's global generator."""
    for name, layer in network.named_modules():
        if not list(layer.parameters(recurse=False)):
            continue
        reset = getattr(layer, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"model: layer '{name}' ({type(layer).__name__}) has weights and no method reset_parameters, so other "
                "random weights cannot be drawn for it; add that method"
            )
        reset()


@contextmanager
def limit_memory(name: str) -> Iterator[None]:
    """Stop the construction of a network as soon as it is too large for the memory of this machine or container."""
    memory, count = total_memory(), 0
    remedy = f"more than the {memory / 1e9:.1f} GB of memory here; make it smaller"

    def count_parameter(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 0 if parameter is None or is_lazy(parameter) else parameter.numel()
        # Four copies of four bytes each.
        if (needed := 4 * 4 * count) > memory:
            raise ConfigError(
                f"model: '{name}' has {count} parameters or more, which with their gradients, the broadcast and the "
                f"reply take {needed / 1e9:.1f} GB, {remedy}"
            )

    try:
        with register_module_parameter_registration_hook(count_parameter):
            yield
    except (MemoryError, RuntimeError, OverflowError, TypeError) as error:
        if not re.search("allocate memory|Storage size|[Oo]verflow", str(error)):
            raise
        raise ConfigError(f"model: '{name}' has a layer that takes {remedy}") from error


def check_model(model: Any, dataset: Dataset, sample: Tensor, name: str, *, attacked: bool) -> None:
    """Check that a model can learn a data set.

    Args:
        model: a model that is not used afterwards, because its BatchNorm statistics may change.
        sample: two training examples in model units.
        attacked: whether attacks that match gradients will differentiate it twice.
    """
    model = check_network(model, name)
    trained = dict(model.named_parameters())
    for key, value in model.state_dict().items():
        # A buffer in float64 may be a constant that the network casts itself.
        taken = (torch.float32,) if key in trained else (torch.float32, torch.float64)
        if value.is_floating_point() and value.dtype not in taken:
            raise ConfigError(
                f"model: '{name}' has '{key}' of {value.dtype}, expected torch.float32, in which clients train and "
                "attacks compute; build the network in it"
            )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model: '{name}' has no parameter to train")

    # One forward pass.
    shape, expected = tuple(sample.shape[1:]), (len(sample), *dataset.task.output_shape)
    inputs = sample if dataset.vocabulary else sample.clone().requires_grad_(True)
    try:
        outputs = model.train()(inputs)
    except (Exception, SystemExit) as error:  # a plug-in may raise anything
        raise ConfigError(f"model: '{name}' does not take inputs of shape {shape}: {describe_error(error)}") from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if got != expected:
        raise ConfigError(
            f"model: '{name}' gives {got} for {len(sample)} examples, expected {expected} for "
            f"{dataset.task.describe_goal()} of '{dataset.name}'; change the model's last layer or the data"
        )
    if complaint := describe_undeclared_term(model, outputs):
        raise ConfigError(f"model: '{name}' {complaint}")
    if not outputs.isfinite().all():
        raise ConfigError(f"model: '{name}' gives NaN or infinite outputs with fresh weights; fix its initialisation")

    # One backward pass, and for attacks the derivative of the gradient's norm.
    try:
        loss = add_model_term(dataset.task.loss, model)(outputs, dataset.train.labels[: len(sample)])
        all_gradients = torch.autograd.grad(loss, parameters, create_graph=attacked, allow_unused=True)
        gradients = [gradient for gradient in all_gradients if gradient is not None]
        if attacked and any(gradient.requires_grad for gradient in gradients):
            squared_norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            variables = inputs if inputs.requires_grad else parameters
            torch.autograd.grad(squared_norm, variables, allow_unused=True)
    except (Exception, SystemExit) as error:
        purpose = "twice, which attacks need" if attacked else "to train it"
        raise ConfigError(f"model: '{name}' cannot be differentiated {purpose}: {describe_error(error)}") from error
    if not gradients:
        raise ConfigError(f"model: no parameter of '{name}' has an influence on its outputs")
