"""The tensors of a model, as messages hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import RunError
from fedsim.wire.messages import State, by_any


def state_of(model: nn.Module, *, statistics: bool = True) -> dict[str, Tensor]:
    """A copy of the parameters and floating-point buffers of `model`, in its own order.

    Integer buffers (BatchNorm's batch counter) are bookkeeping of one process and are never sent.

    Args:
        statistics: whether BatchNorm's running statistics are part of it.
    """
    withheld = set() if statistics else statistics_of(model)
    kept = {k: v for k, v in model.state_dict().items() if v.is_floating_point() and k not in withheld}
    return {name: tensor.detach().clone() for name, tensor in kept.items()}


def statistics_of(model: nn.Module) -> set[str]:
    """Names of the running statistics of BatchNorm layers."""
    layers = [(f"{name}." if name else "", m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    return {f"{prefix}{name}" for prefix, layer in layers for name, _ in layer.named_buffers(recurse=False)}


def orders_of(model: nn.Module) -> tuple[Mapping[str, torch.Size], ...]:
    """The names and shapes that federations send of `model`.

    Those are all that it keeps, all but integer counters, not the running statistics either, or the parameters alone.
    """
    kept, statistics = model.state_dict(), statistics_of(model)
    real = {name: tensor.shape for name, tensor in kept.items() if tensor.is_floating_point()}
    return (
        {name: tensor.shape for name, tensor in kept.items()},
        real,
        {name: shape for name, shape in real.items() if name not in statistics},
        {name: parameter.shape for name, parameter in model.named_parameters()},
    )


def load_state(model: nn.Module, state: State) -> None:
    """Copy `state` into `model`; integer buffers keep their values.

    Raises:
        RunError: `state` has a tensor that the model has not, or in another shape.
    """
    own = model.state_dict()
    _check_tensors(own, state)
    model.load_state_dict({**own, **state})


def load_whole_numbers(model: nn.Module, state: State) -> None:
    """Copy the integers and booleans that a server sent into the buffers of `model`, where `state` has them.

    `load_state` and functional calls bring the real numbers. Strategies average integers into real numbers, which are
    rounded here.
    """
    named = by_any(state, orders_of(model)) or {}
    for name, buffer in model.named_buffers():
        if name in named and not buffer.is_floating_point():
            sent = named[name]
            buffer.copy_(sent.round() if sent.is_floating_point() else sent)


def check_broadcast(model: nn.Module, state: State) -> None:
    """Whether `model` can be trained from `state`, which has each of its parameters and nothing else than the model.

    Raises:
        RunError: it cannot.
    """
    _check_tensors(model.state_dict(), state)
    if missing := [name for name, _ in model.named_parameters() if name not in state]:
        raise RunError(f"the broadcast has no '{missing[0]}', which is a parameter of the model; send all of them")


def _check_tensors(own: State, state: State) -> None:
    for name, tensor in state.items():
        if name not in own:
            raise RunError(f"the model has no '{name}', expected its own tensors alone; send nothing else beside them")
        if tensor.shape != own[name].shape:
            raise RunError(
                f"'{name}' has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)} as in the model"
            )
