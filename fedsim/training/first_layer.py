"""The linear layer that takes a client's inputs themselves, whose update is made of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.randomness import generator


def first_layer(model: nn.Module, inputs: Tensor) -> str | None:
    """Name of the weight of the first linear layer that takes nothing but the flattened inputs; None without one.

    Told by running `model` and looking, as it is and as it is when it is trained: what is put before the layer
    (BatchNorm, a convolution, dropout, any function) makes its input another one. The weight must be a parameter of its
    own, not shared or computed from others.

    Args:
        inputs: `example ...`, any, random for instance.
    """
    name = _first_layer(model, inputs)
    return name if name is not None and _first_layer(deepcopy(model).train(), inputs) == name else None


def _first_layer(model: nn.Module, inputs: Tensor) -> str | None:
    taken: list[tuple[nn.Linear, Tensor]] = []

    def look(layer: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        taken.append((layer, given[0].detach()))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    names = list(model.named_parameters(remove_duplicate=False))
    for layer, given in taken:
        own = [name for name, parameter in names if parameter is layer.weight]
        calls = sum(other is layer for other, _ in taken)
        if len(own) == calls == 1 and torch.equal(given, inputs.flatten(1)):
            return own[0]
    return None


@torch.no_grad()
def rectified(model: nn.Module, layer: str, inputs: Tensor) -> bool:
    """Whether only what is above 0 of what a layer gives goes further, as where a ReLU follows it directly.

    Told by running a copy of `model`, with other weights and running statistics, with and without what is below 0.

    Args:
        layer: its name.
        inputs: `example ...`, any, random for instance.
    """
    model, rng = deepcopy(model), generator("rectified")
    for (
        tensor
    ) in model.state_dict().values():  # a BatchNorm that was not trained changes nothing, and would not be seen
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=rng).to(tensor))

    def outputs_where(change: Callable[[Tensor], Tensor]) -> Tensor:
        hook = model.get_submodule(layer).register_forward_hook(lambda _, given, made: change(made))
        try:
            outputs: Tensor = model(inputs)
        finally:
            hook.remove()
        return outputs

    as_it_is, silent = outputs_where(lambda made: made), outputs_where(lambda made: -made.abs())
    above = outputs_where(lambda made: made.clamp_min(0))
    return torch.equal(as_it_is, above) and not torch.equal(as_it_is, silent)
