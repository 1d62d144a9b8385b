"""Find layers that draw random numbers while a model trains, by behaviour and not by class.

Dropout has many forms: layers of its own, arguments of recurrent and attention layers, functions
that a network calls itself, whole paths that are skipped. All of them draw from torch's generator,
whose state shows it.
"""

from __future__ import annotations

from contextlib import ExitStack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsim.base.errors import RunError, join_first
from fedsim.base.randomness import seed_globals

_MAX_PASSES = 4
"""Most passes over a model; a layer may be reached only once another one is silent."""
_NUM_EXAMPLES = 2
"""Examples of a pass, enough for layers that normalise by the batch."""
_silenced: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""Silenced layers by model; clients of one process train in the same model."""


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the generator that layers on `device` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def find_stochastic_layers(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the names of layers that draw random numbers in a pass, in their present modes.

    A layer counts only for what its own forward pass draws, not for the layers in it. Buffers that
    a pass changes and the states of all generators are restored.

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
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        _run_model(model, inputs, "layers")
    return list(drawing)


def silence_stochastic_layers(model: nn.Module, inputs: Tensor) -> None:
    """Let no layer of `model`, which is in training mode, draw random numbers any more."""
    inputs = inputs[:_NUM_EXAMPLES]
    if model not in _silenced:
        names: list[str] = []
        for _ in range(_MAX_PASSES):
            if not (drawing := find_stochastic_layers(model, inputs)):
                break
            for name in drawing:
                model.get_submodule(name).training = False
            names += drawing
        if not _is_deterministic(model, inputs):
            layers = (
                join_first([f"'{name}'" for name in names], 3) if names else "none that draws from torch's generator"
            )
            raise RunError(
                "training.dropout = false: the model still gives other outputs from pass to pass; "
                f"layers that were put into evaluation mode: {layers}; take what else draws out of "
                "the model"
            )
        _silenced[model] = tuple(names)
    for name in _silenced[model]:
        model.get_submodule(name).training = False


def _is_deterministic(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether two passes under different keys give the same outputs."""
    first, second = (_run_model(model, inputs, key) for key in ("one", "other"))
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return True
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)


@torch.no_grad()
def _run_model(model: nn.Module, inputs: Tensor, key: str) -> object:
    """Return the outputs of a pass that leaves buffers and generators as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with seed_globals("stochastic layers", key):
            return model(inputs)
    finally:
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
