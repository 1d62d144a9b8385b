"""Layers that draw random numbers while a model trains: found by what they do, not by what they are called.

Dropout has many forms: layers of its own, arguments of recurrent and attention layers, functions that a network calls
itself, whole paths that are skipped. All of them draw from torch's generator, whose state shows it.
"""

from __future__ import annotations

from contextlib import ExitStack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsim.errors import RunError, some_of
from fedsim.randomness import seeded

_PASSES = 4  # a layer may be reached only once another one is silent
_ENOUGH = 2  # examples, so that layers that normalise by the batch have one
_silent: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""By model, the layers that were found; clients of one process train in the same one."""


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the generator that layers on `device` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def find_stochastic_layers(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the names of the layers of `model` that draw, in their present modes, in a pass over `inputs`.

    A layer is named only for what its own forward pass draws, and not for the layers in it. Buffers that a pass changes
    are put back, and the states of all generators.

    Args:
        model: in the modes in which it trains.
        inputs: `example ...` in model units.
    """
    names = {module: name for name, module in model.named_modules()}
    drawing: dict[str, None] = {}
    open_layers: list[nn.Module] = []
    last = generator_state(inputs.device)

    def note_draws() -> None:
        nonlocal last
        now = generator_state(inputs.device)
        if open_layers and not torch.equal(now, last):
            drawing[names[open_layers[-1]]] = None
        last = now

    def enter(module: nn.Module, arguments: object) -> None:
        note_draws()
        open_layers.append(module)

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        note_draws()
        open_layers.pop()

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        _passed(model, inputs, "layers")
    return list(drawing)


def silence_stochastic_layers(model: nn.Module, inputs: Tensor) -> None:
    """Let no layer of `model`, which is in training mode, draw random numbers any more.

    Raises:
        RunError: outputs still change from pass to pass.
    """
    inputs = inputs[:_ENOUGH]
    if model not in _silent:
        found: list[str] = []
        for _ in range(_PASSES):
            if not (drawing := find_stochastic_layers(model, inputs)):
                break
            for name in drawing:
                model.get_submodule(name).training = False
            found += drawing
        if not _same_twice(model, inputs):
            named = some_of([f"'{name}'" for name in found], 3) if found else "none that draws from torch's generator"
            raise RunError(
                "training.dropout = false: the model still gives other outputs from pass to pass; layers that were "
                f"put into evaluation mode: {named}; take what else draws out of the model"
            )
        _silent[model] = tuple(found)
    for name in _silent[model]:
        model.get_submodule(name).training = False


def _same_twice(model: nn.Module, inputs: Tensor) -> bool:
    """Tell whether two passes under different keys give the same outputs."""
    first, second = (_passed(model, inputs, key) for key in ("one", "other"))
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return True
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)


@torch.no_grad()
def _passed(model: nn.Module, inputs: Tensor, key: str) -> object:
    """Return the outputs of a pass that leaves buffers and generators as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with seeded("stochastic layers", key):
            return model(inputs)
    finally:
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
