"""Better estimates of inputs from the whole update of a first linear layer, where no column is certain."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.layer import Layer

_SURE = 0.8
"""Share of the units that an estimate leaves silent which are held to be so; the others are those that nearly fire."""
_TURNS, _GAIN = 30, 0.99
_RIDGE = 1e-8


def refined(layer: Layer, inputs: Tensor) -> Tensor:
    """`example input`, by least squares from estimates, in turns of the gradients and of the inputs.

    The update of the layer is D^T X, and D is zero where an example leaves a unit silent, which the estimates tell. So
    D is fitted to X, then X to D, and so on, until what neither explains of the update no longer falls. All numbers of
    the update have a part in that, so noise on it is averaged out.
    """
    target = torch.cat([layer.weight, layer.bias[:, None]], 1)
    best, least = inputs, torch.inf
    for _ in range(_TURNS):
        inputs = layer.clamped(inputs)
        extended = torch.cat([inputs, inputs.new_ones((len(inputs), 1))], 1)
        gradients = _fitted(target, extended, _may_fire(layer, inputs))
        left = float((target - gradients @ extended).norm())
        if left > _GAIN * least:
            break
        best, least = inputs, left
        gram = gradients.T @ gradients
        inputs = torch.linalg.solve(gram + _ridge(gram), gradients.T @ layer.weight)
    return best


def _may_fire(layer: Layer, inputs: Tensor) -> Tensor:
    """`unit example`: 1 where a gradient may be, 0 where the example surely leaves the unit silent."""
    silence = layer.silence(inputs)
    least = silence.where(silence > 0, torch.nan).nanquantile(1 - _SURE, dim=1, keepdim=True)
    return (~(silence >= least)).T.double()


def _fitted(target: Tensor, inputs: Tensor, may_fire: Tensor) -> Tensor:
    """`unit example`: the gradients that make most of the update of each unit, with zeros where they must be."""
    gram = inputs @ inputs.T
    both = may_fire[:, :, None] * (gram + _ridge(gram)) * may_fire[:, None, :] + torch.diag_embed(1 - may_fire)
    gradients: Tensor = torch.linalg.solve(both, may_fire * (target @ inputs.T))
    return gradients * may_fire


def _ridge(gram: Tensor) -> Tensor:
    return _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
