"""Whether BatchNorm layers normalised by the batch while a client trained, and a model whose layers do."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from adversaries.named_states import named_states, running_statistics
from fedsim.wire.messages import Update


def normalising_by_batch(model: nn.Module) -> nn.Module:
    """A copy of `model` whose BatchNorm layers normalise by the batch, as in training, without running statistics."""
    own = deepcopy(model)
    for module in own.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_hook(_by_batch)
    return own


def trained_by_batch(update: Update, model: nn.Module) -> bool:
    """Whether the client's BatchNorm layers normalised by the batch, as in training, as far as its message shows.

    They did where it returned other running statistics than it was sent. Where statistics are not sent, the batch is
    all that there is to normalise by.
    """
    names = running_statistics(model)
    if not names:
        return False
    states = named_states(update, model, f"round {update.round}, client {update.client}")
    if any(name not in states.before for name in names):
        return True
    return any(name in states.after and not torch.equal(states.after[name], states.before[name]) for name in names)


def _by_batch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(layer, _BatchNorm)
    return batch_norm(inputs[0], None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
