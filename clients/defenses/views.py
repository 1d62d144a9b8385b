"""What zeros in a sent update tell an adversary who knows why they are there; pieces of `Defense.adversary_view`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.wire.messages import State

_SURE = 0.01
"""A probability below which zeros are not taken for chance."""


def with_bounds(gradient: State, sent: State, bounds: State) -> State:
    """`gradient`, in which numbers that were not sent count half up to the bound below which nothing is, wholly beyond.

    Half is between the adversary who takes what was not sent for zero, which most of it is nearly, and one to whom it
    says nothing up to the bound: attacks found more by it than by either.

    Args:
        bounds: by name, one number of at least 0, in the unit of `sent`. `gradient` is taken to be as long as `sent`,
            over the numbers that were sent, where its unit is another.
    """
    there = {name: tensor != 0 for name, tensor in sent.items()}
    unit = _length([gradient[name] * there[name] for name in gradient]) / _length([sent[name] for name in gradient])
    seen = {}
    for name, tensor in gradient.items():
        bound = bounds[name] * unit.detach()
        seen[name] = torch.where(there[name], tensor, tensor - tensor.clamp(-bound, bound) / 2)
    return seen


def smallest_sent(sent: Tensor) -> Tensor:
    """The smallest absolute value of the numbers that were sent, infinite where all are zero."""
    sizes = torch.where(sent != 0, sent.abs(), torch.inf)
    return sizes.min() if sizes.numel() else sizes.sum()


def by_chance(sent: Tensor, masked: float) -> Tensor:
    """Which numbers of `sent` are zero because of a random mask, as far as can be told.

    A row or a column of a matrix in which nothing was sent, though a mask would hardly leave out so many numbers at
    once, is zero by itself, as of a unit or a pixel that is silent. Tensors of more axes are matrices with one row for
    each entry of the first axis.

    Args:
        masked: probability of each number to be left out.
    """
    zeros = sent == 0
    if sent.ndim < 2 or not sent.numel():
        return zeros
    flat = zeros.flatten(1)
    silent = torch.zeros_like(flat)
    for axis in (0, 1):
        if masked ** flat.shape[axis] < _SURE:
            silent |= flat.all(axis, keepdim=True)
    return (flat & ~silent).view_as(zeros)


def _length(tensors: list[Tensor]) -> Tensor:
    size = torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()
    return size.clamp_min(torch.finfo(size.dtype).tiny)
