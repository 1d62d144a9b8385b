"""Refinement of estimated inputs by the whole update of a first linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.layer import FirstLayer

_SURE_SHARE = 0.8
"""Share of the units that an estimate leaves silent which count as silent; the rest nearly fire."""
_ROUNDS, _LEAST_GAIN = 30, 0.99
_RIDGE = 1e-8


def refine_inputs(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Refine estimates of the inputs by least squares, fitting gradients and inputs in turn.

    The update of the layer is D^T X, and D is zero where an example leaves a unit silent, which the
    estimates tell. So D is fitted to X, then X to D, and so on, until the unexplained part of the
    update no longer falls. All numbers of the update take part, so noise on it is averaged out.

    Args:
        inputs: `example input`, as is what is returned.
    """
    target = torch.cat([layer.weight, layer.bias[:, None]], 1)
    best, least = inputs, torch.inf
    for _ in range(_ROUNDS):
        # Fit the gradients.
        inputs = layer.clamp_inputs(inputs)
        extended = torch.cat([inputs, inputs.new_ones((len(inputs), 1))], 1)
        gradients = _fit_gradients(target, extended, _may_fire(layer, inputs))
        unexplained = float((target - gradients @ extended).norm())
        if unexplained > _LEAST_GAIN * least:
            break
        best, least = inputs, unexplained
        # Fit the inputs.
        gram = gradients.T @ gradients
        inputs = torch.linalg.solve(gram + _ridge(gram), gradients.T @ layer.weight)
    return best


def _may_fire(layer: FirstLayer, inputs: Tensor) -> Tensor:
    """Return `unit example`, 0 if the example surely leaves the unit silent, else 1."""
    silence = layer.silence(inputs)
    silent_values = silence.where(silence > 0, torch.nan)
    least = silent_values.nanquantile(1 - _SURE_SHARE, dim=1, keepdim=True)
    return (~(silence >= least)).T.double()


def _fit_gradients(target: Tensor, inputs: Tensor, may_fire: Tensor) -> Tensor:
    """Fit `unit example`, the gradients of each unit, which are 0 unless the unit may fire."""
    gram = inputs @ inputs.T
    masked = may_fire[:, :, None] * (gram + _ridge(gram)) * may_fire[:, None, :]
    systems = masked + torch.diag_embed(1 - may_fire)
    gradients: Tensor = torch.linalg.solve(systems, may_fire * (target @ inputs.T))
    return gradients * may_fire


def _ridge(gram: Tensor) -> Tensor:
    return _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
