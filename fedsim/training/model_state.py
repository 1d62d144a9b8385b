"""Tensors of a model: those that messages hold, and how they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base.errors import RunError
from fedsim.recording.wire_format import State, match_any_names


def copy_state(model: nn.Module, *, statistics: bool = True) -> dict[str, Tensor]:
    """Copy the parameters and floating-point buffers of `model`, in its own order.

    Integer buffers (BatchNorm's batch counter) are bookkeeping of one process and are never sent.

    Args:
        statistics: whether BatchNorm's running statistics are included.
    """
    excluded = set() if statistics else running_statistics(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and name not in excluded:
            state[name] = tensor.detach().clone()
    return state


def running_statistics(model: nn.Module) -> set[str]:
    """Return the names of the running statistics of BatchNorm layers."""
    names: set[str] = set()
    for layer_name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            prefix = f"{layer_name}." if layer_name else ""
            names.update(f"{prefix}{name}" for name, _ in layer.named_buffers(recurse=False))
    return names


def sendable_shapes(model: nn.Module) -> tuple[Mapping[str, torch.Size], ...]:
    """Return the sets of tensors, names with shapes, that federations may send of `model`.

    These are: the whole state; without integer counters; without running statistics as well; the
    parameters alone.
    """
    state, statistics = model.state_dict(), running_statistics(model)
    floating = {name: tensor.shape for name, tensor in state.items() if tensor.is_floating_point()}
    return (
        {name: tensor.shape for name, tensor in state.items()},
        floating,
        {name: shape for name, shape in floating.items() if name not in statistics},
        {name: parameter.shape for name, parameter in model.named_parameters()},
    )


def load_state(model: nn.Module, state: State) -> None:
    """Copy `state` into `model`; integer buffers keep their values."""
    _load_tensors(model, _check_tensors(model, state), state)


def load_broadcast(model: nn.Module, state: State) -> None:
    """Copy `state` into `model` as `load_state` does, but only a state with all parameters."""
    _load_tensors(model, check_broadcast(model, state), state)


def load_integer_buffers(model: nn.Module, state: State) -> None:
    """Copy integers and booleans of `state` into the buffers of `model`.

    Floating-point tensors are loaded by `load_state` or functional calls. Strategies average
    integers into floating-point numbers, which are rounded here.
    """
    tensors_by_name = match_any_names(state, sendable_shapes(model)) or {}
    for name, buffer in model.named_buffers():
        if name in tensors_by_name and not buffer.is_floating_point():
            tensor = tensors_by_name[name]
            buffer.copy_(tensor.round() if tensor.is_floating_point() else tensor)


def check_broadcast(model: nn.Module, state: State) -> State:
    """Check that `state` has all parameters of `model` and nothing that the model does not have.

    Returns:
        All tensors of the model, by name.
    """
    model_tensors = _check_tensors(model, state)
    if missing := [name for name, _ in model.named_parameters() if name not in state]:
        raise RunError(f"the broadcast has no '{missing[0]}', which is a parameter of the model; send all of them")
    return model_tensors


def _check_tensors(model: nn.Module, state: State) -> State:
    """Return all tensors of the model by name, after a check that it has those of `state`."""
    model_tensors: State = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name not in model_tensors:
            raise RunError(f"the model has no '{name}', expected its own tensors alone; send nothing else")
        expected = model_tensors[name].shape
        if tensor.shape != expected:
            raise RunError(f"'{name}' has shape {tuple(tensor.shape)}, expected {tuple(expected)} as in the model")
    return model_tensors


def _load_tensors(model: nn.Module, model_tensors: State, state: State) -> None:
    """Copy `state` into `model`, whose tensors by name are `model_tensors`."""
    has_buffers = any(type(model_tensors[name]) is not nn.Parameter for name in state)
    if has_buffers or any(map(_acts_on_loading, model.modules())):
        model.load_state_dict({**model_tensors, **state})
        return
    # A network of parameters alone is loaded in a fraction of the time.
    with torch.no_grad():
        for name, tensor in state.items():
            model_tensors[name].copy_(tensor)


def _acts_on_loading(module: nn.Module) -> bool:
    """Return whether `module` does more than copy its parameters when a state is loaded."""
    kind = type(module)
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
    )
