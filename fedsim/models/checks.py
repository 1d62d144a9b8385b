"""Whether a network fits its task, found out before work starts: one forward pass, one double backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedsim.datasets import Dataset
from fedsim.errors import ConfigError


def a_network(thing: Any, name: str) -> nn.Module:
    """`thing`, which the model called `name` gave, if it is a network.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(thing, nn.Module):
        raise ConfigError(f"model: '{name}' gave a {type(thing).__name__}, expected a torch.nn.Module")
    return thing


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
    except Exception as error:  # whatever it is, it is the network that does not take these inputs
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
    except Exception as error:
        times = "twice, which attacks need" if attacked else "to train it"
        raise ConfigError(f"model: '{name}' cannot be differentiated {times}: {_line(error)}") from error
    if not used:
        raise ConfigError(f"model: no parameter of '{name}' has an influence on its outputs")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
