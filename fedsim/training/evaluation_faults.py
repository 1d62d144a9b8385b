"""Find what makes a network's evaluation say something else than people read in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base.randomness import seed_globals
from fedsim.training.modes import forward, set_evaluation_modes

_TOLERANCE = 1e-3
"""Relative difference of outputs that is no rounding; batches of other sizes are rounded otherwise."""


@torch.no_grad()
def describe_evaluation_faults(model: nn.Module, inputs: Tensor) -> str:
    """Return what is wrong with the outputs in evaluation, as a sentence; empty where nothing is.

    Args:
        model: whose running statistics are shared; its modes change.
        inputs: `example ...` in model units; whether they mix shows from four on.
    """
    set_evaluation_modes(model, model.state_dict())
    whole, again = (_compute_outputs(model, inputs, key) for key in ("one", "other"))
    if not _agree(whole, again):
        return (
            "its outputs change from pass to pass in evaluation, too, so that accuracy and what attacks compute are "
            "of one random pass; let it draw in training alone, as in dropout(x, training=self.training)"
        )
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules()):
        return ""  # it normalises by the batch, as it was told to
    half = len(inputs) // 2
    if half < 2:
        return ""  # many networks squeeze the axis of a single example away, which is no mixing
    halves = [_compute_outputs(model, part, "one") for part in (inputs[:half], inputs[half:])]
    if not _agree(whole, torch.cat(halves)):
        return (
            "what it computes of an example in evaluation depends on the others of the batch, as in a recurrent layer "
            "without batch_first, so that accuracy and losses are of batches, not of examples; keep examples apart"
        )
    return ""


def _compute_outputs(model: nn.Module, inputs: Tensor, key: str) -> Tensor:
    with seed_globals("evaluation faults", key):
        return forward(model, inputs)


def _agree(first: Tensor, second: Tensor) -> bool:
    difference = (first.double() - second.double()).abs().nan_to_num().max()
    return bool(difference <= _TOLERANCE * first.double().abs().nan_to_num().max() + 1e-6)
