"""Modes of layers: which statistics BatchNorm uses, whether dropout drops, what is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import instance_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedsim.base.errors import RunError
from fedsim.base.module_hooks import hook_outputs
from fedsim.recording.wire_format import State
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import silence_stochastic_layers


def set_modes(model: nn.Module, settings: LocalTraining, inputs: Tensor) -> None:
    """Put every layer of `model` into the mode that `settings` ask for.

    Args:
        model: only modes and BatchNorm's batch counters are changed.
        settings: with `dropout = false`, no layer draws random numbers.
        inputs: `example ...` in model units, used to find layers that draw.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(settings.batch_norm == "train")
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.zero_()
    if not settings.dropout:
        silence_stochastic_layers(model, inputs)


def normalise_by_instance(model: nn.Module, before: State, after: State) -> None:
    """Let InstanceNorm layers of `model` normalise each example by itself, if they did in training.

    In evaluation, those with running statistics normalise by these. Layers were in training mode
    where a client returned other running statistics than it received, or where these are not sent.

    Args:
        model: it gets a hook for each such layer.
        before: state that the server sent, under the names of the model.
        after: state that the client returned, likewise.
    """
    for name, module in model.named_modules():
        mean = f"{name}.running_mean".removeprefix(".")
        if isinstance(module, _InstanceNorm) and module.running_mean is not None:
            is_unchanged = mean in before and mean in after and torch.equal(before[mean], after[mean])
            if not is_unchanged:
                hook_outputs(module, _normalise_each_instance)


def _normalise_each_instance(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(layer, _InstanceNorm)
    return instance_norm(inputs[0], None, None, layer.weight, layer.bias, use_input_stats=True, eps=layer.eps)


def set_evaluation_modes(model: nn.Module, state: State) -> None:
    """Put `model` into evaluation mode, except BatchNorm layers without statistics in `state`."""
    model.eval()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and f"{name}.running_mean".removeprefix(".") not in state:
            module.train()


def list_batch_norms(model: nn.Module) -> list[str]:
    """Return the names of all BatchNorm layers."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def find_mixing_batch_norm(model: nn.Module, settings: LocalTraining) -> str | None:
    """Describe the first layer that mixes examples when trained by `settings`; None without any."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (settings.batch_norm == "train" or module.running_mean is None):
            return f"layer '{name}' ({type(module).__name__})"
    return None


def normalise_by_batch(model: nn.Module) -> list[_BatchNorm]:
    """Put `model` into evaluation mode, except its BatchNorm layers, which are returned."""
    model.eval()
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        layer.train()
    return layers


def freeze_parameters(model: nn.Module, settings: LocalTraining) -> AbstractContextManager[None]:
    """Keep scale and shift of BatchNorm layers untrained, where `settings` ask for it."""
    if settings.batch_norm != "frozen":
        return nullcontext()
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return _freeze(parameter for layer in layers for parameter in layer.parameters())


def freeze_all_except(model: nn.Module, trained: Collection[str] | None) -> AbstractContextManager[None]:
    """Keep all parameters but `trained`, by name, untrained; None changes nothing."""
    if trained is None:
        return nullcontext()
    return _freeze(parameter for name, parameter in model.named_parameters() if name not in trained)


@contextmanager
def _freeze(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep those of the parameters untrained that are trained otherwise."""
    frozen_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in frozen_parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen_parameters:
            parameter.requires_grad_(True)


def trained_shapes(model: nn.Module, settings: LocalTraining) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that local training changes, in the model's order."""
    with freeze_parameters(model, settings):
        return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def forward(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the outputs of `model` for `batch`."""
    try:
        outputs: Tensor = model(batch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RunError(
            "a batch of one example has no statistics to normalise it by; choose a "
            "training.batch_size that leaves no single example over, more test examples, or "
            "batch_norm = 'eval'"
        ) from error
    return outputs
