"""Check that training keeps examples independent, as bounding the effect of each requires.

`fedsim.training.modes.find_mixing_batch_norm` knows the layers of PyTorch that mix examples; the
functions here run networks and defenses of any kind on a few examples and compare what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.defense_calls import apply_on_batch
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.training.modes import set_modes
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import find_stochastic_layers

_MAX_BATCH_SIZE = 8
"""Most examples in a batch that is tried."""


def check_example_independence(
    model: nn.Module,
    settings: LocalTraining,
    defenses: Sequence[Defense],
    inputs: Tensor,
    labels: Tensor,
) -> None:
    """Check that examples stay independent, where a defense sees the gradient of each.

    No example may change what is computed from another. A layer that stores something of its inputs
    in a buffer is refused as well: the buffer is sent with the weights, whatever that defense does to
    the gradients. Two batches that share only their last example are compared.

    Args:
        model: it is used up: its buffers may change.
        inputs: `example ...` in model units, a few of the data set.
        labels: `example`, of the same examples.
    """
    names_of_seeing = [name_of_defense(defense) for defense in defenses if overrides(defense, "on_examples")]
    size = min(_MAX_BATCH_SIZE, len(inputs) // 2)
    if not names_of_seeing or not size:
        return
    # Two batches that differ in all examples but the last one.
    first_batch = inputs[:size], labels[:size]
    second_batch = (
        _replace_last_row(inputs[size : 2 * size], inputs[size - 1]),
        _replace_last_row(labels[size : 2 * size], labels[size - 1]),
    )
    # Defenses that replace the batch.
    for defense in defenses:
        if not defense.mixes and _mixes_examples(defense, first_batch, second_batch):
            raise ConfigError(
                f"defense: {names_of_seeing[0]} is to see the gradient of each example, but "
                f"{name_of_defense(defense)} lets one example change what it makes of another; let its "
                "on_batch treat each example by itself, or leave one of them out"
            )
    # Layers that store their inputs, and layers that mix them.
    if layer := find_storing_layer(model, settings, first_batch[0]):
        raise ConfigError(
            f"defense: {names_of_seeing[0]} is to bound what each example changes, but {layer} "
            "keeps statistics of its inputs, which are sent with the weights; let it keep none, "
            "or choose another model"
        )
    if layer := find_mixing_layer(model, settings, first_batch[0], second_batch[0]):
        raise ConfigError(
            f"defense: {names_of_seeing[0]} is to see the gradient of each example, but {layer} "
            "lets one example change what comes of another; choose a layer that treats each by "
            "itself, or another model"
        )


def find_storing_layer(model: nn.Module, settings: LocalTraining, inputs: Tensor) -> str | None:
    """Describe the first layer that stores something of `inputs` in a buffer; None without any.

    Only floating-point buffers count, as those are sent with the weights.
    """
    set_modes(model, settings, inputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _layer_outputs(model, inputs)
    for name, buffer in model.named_buffers():
        old_buffer = before.get(name, buffer.new_empty(0))
        if buffer.is_floating_point() and not torch.equal(buffer, old_buffer):
            return _describe_layer(model, name.rpartition(".")[0])
    return None


def find_mixing_layer(model: nn.Module, settings: LocalTraining, batch: Tensor, other_batch: Tensor) -> str | None:
    """Describe the first layer whose output for an example depends on the rest of the batch.

    Args:
        batch: `example ...`.
        other_batch: another batch of the same size, with the same last example.

    Returns:
        None where the outputs of the whole model for that example agree.
    """
    set_modes(model, replace(settings, dropout=False), batch)
    return _find_difference(model, _layer_outputs(model, batch), _layer_outputs(model, other_batch), _last_rows_agree)


def find_training_only_layer(model: nn.Module, inputs: Tensor) -> str | None:
    """Describe the first layer that training computes otherwise than evaluation; None without any.

    Layers that draw random numbers are left out, and those that normalise by running statistics in
    evaluation.

    Args:
        model: it is copied.
        inputs: `example ...` in model units.
    """
    training_model = deepcopy(model).train()
    for layer in training_model.modules():
        if isinstance(layer, (_BatchNorm, _InstanceNorm)):
            layer.eval()
    for name in find_stochastic_layers(training_model, inputs):
        training_model.get_submodule(name).training = False
    in_training = _layer_outputs(training_model, inputs)
    in_evaluation = _layer_outputs(deepcopy(model).eval(), inputs)
    return _find_difference(model, in_training, in_evaluation, _outputs_agree)


def _find_difference(
    model: nn.Module, first: Mapping[str, Any], second: Mapping[str, Any], agree: Callable[[Any, Any], bool]
) -> str | None:
    """Describe the first layer whose outputs do not agree, see `_layer_outputs`; None where those of the model do."""
    if agree(first[""], second[""]):
        return None
    differing = [name for name in first if name in second and not agree(first[name], second[name])]
    return _describe_layer(model, differing[0])


def _layer_outputs(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """Return each innermost layer's first output, in order of use; under '' that of the model."""
    outputs: dict[str, Any] = {}

    def record_as(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            outputs.setdefault(name, output)

        return record

    with ExitStack() as hooks, torch.no_grad(), seed_globals("apart"):
        for name, module in model.named_modules():
            if name and not any(True for _ in module.children()):
                hooks.enter_context(module.register_forward_hook(record_as(name)))
        model_output = model(inputs)
    return outputs | {"": model_output}


def _last_rows_agree(first: Any, second: Any) -> bool:
    """Return whether the last rows agree; anything but tensors of one shape counts as agreeing."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return True
    if first.ndim == 0 or first.shape != second.shape:
        return True
    return _outputs_agree(first[-1], second[-1])


def _outputs_agree(first: Any, second: Any) -> bool:
    """Return whether outputs agree up to rounding; anything but tensors of one shape does."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return True
    if first.shape != second.shape:
        return True
    return torch.allclose(first.double(), second.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _mixes_examples(defense: Defense, first_batch: tuple[Tensor, Tensor], second_batch: tuple[Tensor, Tensor]) -> bool:
    """Return whether what `on_batch` makes of the last example depends on those before it."""
    first = apply_on_batch(defense, *first_batch, LocalContext(rng=generator("apart")))
    second = apply_on_batch(defense, *second_batch, LocalContext(rng=generator("apart")))
    return not all(_last_rows_agree(*tensors) for tensors in zip(first, second, strict=True))


def _replace_last_row(rows: Tensor, last: Tensor) -> Tensor:
    return torch.cat([rows[:-1], last[None]])


def _describe_layer(model: nn.Module, name: str) -> str:
    if not name:
        return f"the {type(model).__name__}"
    return f"layer '{name}' ({type(model.get_submodule(name)).__name__})"
