"""Whether examples stay apart in training, as is needed where what one example changes is to be bounded.

`fedsim.training.modes.mixing_layer` knows the layers of PyTorch that mix examples; here, whatever networks and defenses
are made of is tried out on a few examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.defense import Defense, called, overrides, replaced_batch
from fedsim.errors import ConfigError
from fedsim.randomness import generator, seeded
from fedsim.training.modes import set_modes
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import find_stochastic_layers

_MOST = 8
"""Examples in a batch that is tried."""


def check_apart(
    model: nn.Module, settings: LocalTraining, defenses: Sequence[Defense], inputs: Tensor, labels: Tensor
) -> None:
    """Raise ConfigError where one example changes what is made of another, if a defense sees the gradient of each.

    Or where a layer keeps something of its inputs and sends it beside the weights, whatever that defense does.

    Args:
        model: it is used up: its buffers may change.
        inputs: `example ...` in model units, a few of the data set.
        labels: `example`, of them.
    """
    seeing = [called(defense) for defense in defenses if overrides(defense, "on_examples")]
    size = min(_MOST, len(inputs) // 2)
    if not seeing or not size:
        return
    one = inputs[:size], labels[:size]
    other = _with_last(inputs[size : 2 * size], inputs[size - 1]), _with_last(labels[size : 2 * size], labels[size - 1])
    for defense in defenses:
        if not defense.mixes and _mixes(defense, one, other):
            raise ConfigError(
                f"defense: {seeing[0]} is to see the gradient of each example, but {called(defense)} lets one "
                "example change what it makes of another; let its on_batch treat each example by itself, or leave one "
                "of them out"
            )
    if layer := keeping_layer(model, settings, one[0]):
        raise ConfigError(
            f"defense: {seeing[0]} is to bound what each example changes, but {layer} keeps statistics of its inputs, "
            "which are sent beside the weights; let it keep none, or choose another model"
        )
    if layer := changed_layer(model, settings, one[0], other[0]):
        raise ConfigError(
            f"defense: {seeing[0]} is to see the gradient of each example, but {layer} lets one example change what "
            "comes of another; choose a layer that treats each by itself, or another model"
        )


def keeping_layer(model: nn.Module, settings: LocalTraining, inputs: Tensor) -> str | None:
    """The first layer that puts something of `inputs` into a floating-point buffer, which is sent; None without any."""
    set_modes(model, settings, inputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _outputs(model, inputs)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not torch.equal(buffer, before.get(name, buffer.new_empty(0))):
            return _named(model, name.rpartition(".")[0])
    return None


def changed_layer(model: nn.Module, settings: LocalTraining, one: Tensor, other: Tensor) -> str | None:
    """The first layer in which the last example, the same in two batches, becomes something else; None without any."""
    set_modes(model, replace(settings, dropout=False), one)
    first, second = _outputs(model, one), _outputs(model, other)
    if _last_alike(first[""], second[""]):
        return None
    differing = [name for name in first if name in second and not _last_alike(first[name], second[name])]
    return _named(model, differing[0])


def training_only_layer(model: nn.Module, inputs: Tensor) -> str | None:
    """The first layer that computes otherwise while a model trains than in evaluation; None without any.

    Layers that draw are left out, and those that normalise by running statistics in evaluation.

    Args:
        model: it is copied.
        inputs: `example ...` in model units.
    """
    own = deepcopy(model).train()
    for layer in own.modules():
        if isinstance(layer, (_BatchNorm, _InstanceNorm)):
            layer.eval()
    for name in find_stochastic_layers(own, inputs):
        own.get_submodule(name).training = False
    trained = _outputs(own, inputs)
    evaluated = _outputs(deepcopy(model).eval(), inputs)
    if _alike(trained[""], evaluated[""]):
        return None
    return _named(
        model, next(name for name in trained if name in evaluated and not _alike(trained[name], evaluated[name]))
    )


def _outputs(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """What each layer without layers in it gives for `inputs`, in the order of the first pass; under '' the model."""
    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, given, output: found.setdefault(name, output)

    with ExitStack() as hooks, torch.no_grad(), seeded("apart"):
        for name, module in model.named_modules():
            if name and not any(True for _ in module.children()):
                hooks.callback(module.register_forward_hook(keep(name)).remove)
        outputs = model(inputs)
    return found | {"": outputs}


def _last_alike(one: Any, other: Any) -> bool:
    """Whether two outputs of one shape have the same last row; what is no tensor says nothing."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim and one.shape == other.shape):
        return True
    return _alike(one[-1], other[-1])


def _alike(one: Any, other: Any) -> bool:
    """Whether two outputs are the same but for rounding; what is no tensor says nothing."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape):
        return True
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _mixes(defense: Defense, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether what `on_batch` makes of the last example depends on those before it."""
    first, second = (replaced_batch(defense, *batch, generator("apart")) for batch in (one, other))
    return not all(_last_alike(here, there) for here, there in zip(first, second, strict=True))


def _with_last(rows: Tensor, last: Tensor) -> Tensor:
    return torch.cat([rows[:-1], last[None]])


def _named(model: nn.Module, name: str) -> str:
    return f"layer '{name}' ({type(model.get_submodule(name)).__name__})" if name else f"the {type(model).__name__}"
