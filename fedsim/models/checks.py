"""Checks, before work starts, that a network fits its task: one forward pass and one double backward pass."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError


def a_network(thing: Any, name: str) -> nn.Module:
    """`thing`, which the model called `name` gave, if it is a network.

    Raises:
        ConfigError: it is something else, or has layers without a size.
    """
    if not isinstance(thing, nn.Module):
        raise ConfigError(f"model: '{name}' gave a {type(thing).__name__}, expected a torch.nn.Module")
    if complaint := unsized(thing):
        raise ConfigError(f"model: '{name}' {complaint}")
    return thing


def unsized(network: nn.Module) -> str:
    """What is wrong with a network that has layers without a size; nothing where there are none."""
    for key, value in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(value):
            owner = type(network.get_submodule(key.rpartition(".")[0])).__name__
            return (
                f"does not say how large '{key}' is, of a {owner}, which takes its size from the first input; name the "
                "sizes, so that weights can be sent before there is one"
            )
    return ""


def drawn_anew(network: nn.Module) -> None:
    """Draw the weights of all layers anew, from torch's global generator.

    Raises:
        ConfigError: a layer has weights and no method `reset_parameters`.
    """
    for name, layer in network.named_modules():
        if not any(True for _ in layer.parameters(recurse=False)):
            continue
        reset = getattr(layer, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"model: layer '{name}' ({type(layer).__name__}) has weights and no method reset_parameters, so other "
                "random weights cannot be drawn for it; add that method"
            )
        reset()


@contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Raise while a network is built, as soon as it could not be trained in this machine's memory.

    Raises:
        ConfigError: its weights, their gradients and the messages are larger than the memory.
    """
    there, numbers = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    remedy = f"more than the {there / 1e9:.0f} GB of memory here; make it smaller"

    def count(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        nonlocal numbers
        numbers += 0 if parameter is None or is_lazy(parameter) else parameter.numel()
        if (needed := 4 * 4 * numbers) > there:
            raise ConfigError(
                f"model: '{name}' has {numbers} parameters or more, which with their gradients, the broadcast and the "
                f"reply take {needed / 1e9:.0f} GB, {remedy}"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, TypeError) as error:
        if not re.search("allocate memory|Storage size|[Oo]verflow", str(error)):
            raise
        raise ConfigError(f"model: '{name}' has a layer that takes {remedy}") from error
    finally:
        hook.remove()


def check_model(model: Any, dataset: Dataset, sample: Tensor, name: str, *, attacked: bool) -> None:
    """Raise where `model` cannot learn `dataset`.

    Args:
        model: it is used up: its BatchNorm statistics may change.
        sample: two training examples in model units.
        name: what the experiment calls the model.
        attacked: attacks that match gradients will differentiate twice.

    Raises:
        ConfigError: it is no network, does not take the inputs, its outputs do not fit the classes or
            are not finite, nothing of it can be trained, or it cannot be differentiated twice.
    """
    model = a_network(model, name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model: '{name}' has no parameter to train")
    shape, wanted = tuple(sample.shape[1:]), (len(sample), dataset.task.outputs)
    inputs = sample if dataset.vocabulary else sample.clone().requires_grad_(True)
    try:
        outputs = model.train()(inputs)
    except (Exception, SystemExit) as error:  # whatever it is, it is the network that does not take these inputs
        raise ConfigError(f"model: '{name}' does not take inputs of shape {shape}: {_line(error)}") from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if got != wanted:
        what = f"the {dataset.num_classes} classes" if dataset.num_classes else "the one target"
        raise ConfigError(
            f"model: '{name}' gives {got} for {len(sample)} examples, expected {wanted} for {what} of "
            f"'{dataset.name}'; change the model's last layer or the data"
        )
    if not outputs.isfinite().all():
        raise ConfigError(f"model: '{name}' gives NaN or infinite outputs with fresh weights; mend its initialisation")
    try:
        loss = dataset.task.loss(outputs, dataset.train.labels[: len(sample)])
        gradients = torch.autograd.grad(loss, parameters, create_graph=attacked, allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None]
        if attacked and any(gradient.requires_grad for gradient in used):
            length = torch.stack([gradient.square().sum() for gradient in used]).sum()
            torch.autograd.grad(length, inputs if inputs.requires_grad else parameters, allow_unused=True)
    except (Exception, SystemExit) as error:
        times = "twice, which attacks need" if attacked else "to train it"
        raise ConfigError(f"model: '{name}' cannot be differentiated {times}: {_line(error)}") from error
    if not used:
        raise ConfigError(f"model: no parameter of '{name}' has an influence on its outputs")


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
