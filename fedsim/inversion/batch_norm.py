"""BatchNorm layers that normalise by the batch: detect them, and make a model use them."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base.errors import AttackError
from fedsim.base.module_hooks import hook_outputs
from fedsim.inversion.named_states import named_states, running_statistic_names
from fedsim.inversion.problem import InversionProblem
from fedsim.recording.wire_format import Update
from fedsim.training.modes import list_batch_norms


def copy_with_batch_statistics(model: nn.Module) -> nn.Module:
    """Copy `model` with BatchNorm layers that normalise by the batch, as in training."""
    copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, _BatchNorm):
            hook_outputs(module, _normalise_by_batch)
    return copy


def used_batch_statistics(update: Update, model: nn.Module) -> bool:
    """Return whether the client's BatchNorm layers normalised by the batch while it trained.

    They did if it returned other running statistics than it was sent. If statistics are not sent at
    all, the batch is all there is to normalise by. If they are sent and do not come back, as in a recording made
    elsewhere, nothing tells, and a check of the recording warns that this says no.
    """
    names = running_statistic_names(model)
    if not names:
        return False
    states = named_states(update, model, update.name, body_alone=True)
    if any(name not in states.before for name in names):
        return True
    before, after = states.before, states.after
    return any(name in after and not torch.equal(after[name], before[name]) for name in names)


def check_returned_statistics(problem: InversionProblem) -> None:
    """Raise AttackError unless the client returned the running statistics of all BatchNorm layers, if there are any."""
    layers = list_batch_norms(problem.model)
    means = {f"{name}.running_mean".removeprefix(".") for name in layers}
    if not layers or not means <= problem.returned_buffers.keys():
        reason = "the client returned no statistics of theirs" if layers else "the model has none"
        raise missing_statistics_error(problem.where, reason)


def missing_statistics_error(where: str, reason: str) -> AttackError:
    """Return the error of an attack whose prior on BatchNorm statistics has nothing to compare with."""
    return AttackError(f"{where}: bn_weight is a prior on BatchNorm layers, and {reason}; set bn_weight = 0")


def _normalise_by_batch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(layer, _BatchNorm)
    return batch_norm(inputs[0], None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
