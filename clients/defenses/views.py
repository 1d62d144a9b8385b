"""Parts of `Defense.adversary_view`, for an adversary that knows why a sent update has zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.recording.wire_format import State

_MAX_CHANCE = 0.01
"""Probability below which zeros are not attributed to a random mask."""


def shrink_unsent(gradient: State, sent: State, bounds: State) -> State:
    """Halve numbers of `gradient` that were not sent, up to the bound below which none is sent.

    An unsent number is nearly zero, so to match it in full is wrong, as is to ignore it. Attacks
    reconstruct more when it counts half than in either case. The part beyond the bound counts in
    full.

    Args:
        gradient: the gradient of the dummy data.
        sent: the gradient that was sent, with zeros for numbers that were not.
        bounds: name to a number of at least 0, in the unit of `sent`. If `gradient` has another
            unit, it is scaled so that both have the same norm over the numbers that were sent.
    """
    is_sent = {name: tensor != 0 for name, tensor in sent.items()}
    unit = _norm([gradient[name] * is_sent[name] for name in gradient]) / _norm([sent[name] for name in gradient])
    view = {}
    for name, tensor in gradient.items():
        bound = bounds[name] * unit.detach()
        view[name] = torch.where(is_sent[name], tensor, tensor - tensor.clamp(-bound, bound) / 2)
    return view


def bounds_of_unsent(sent: State, limits: State) -> dict[str, Tensor]:
    """Return for each number that was sent as zero how large it may be, and 0 for all others.

    Args:
        sent: what was sent.
        limits: by name, the size below which numbers are not sent; an infinite one bounds nothing.
    """
    bounds = {}
    for name, tensor in sent.items():
        bounds[name] = torch.where((tensor == 0) & limits[name].isfinite(), limits[name], 0.0)
    return bounds


def smallest_magnitude(sent: Tensor) -> Tensor:
    """Return the smallest absolute value of the numbers that are not zero, infinite where all are.

    >>> smallest_magnitude(torch.tensor([0.0, -2.0, 3.0]))
    tensor(2.)
    """
    sizes = torch.where(sent != 0, sent.abs(), torch.inf)
    return sizes.min() if sizes.numel() else sizes.sum()


def find_random_mask(sent: Tensor, masked: float) -> Tensor:
    """Return which numbers of `sent` are zero because of a random mask, as far as can be inferred.

    If a whole row or column of a matrix is zero, and a mask would hardly leave out so many numbers
    at once, its gradient itself is zero: a unit or pixel is inactive. Tensors of more axes are
    matrices with one row for each entry of the first axis.

    Args:
        sent: a tensor of the update that was sent.
        masked: probability that a number is left out.
    """
    zeros = sent == 0
    if sent.ndim < 2 or not sent.numel():
        return zeros
    flat = zeros.flatten(1)
    inactive = torch.zeros_like(flat)
    for axis in (0, 1):
        if masked ** flat.shape[axis] < _MAX_CHANCE:
            inactive |= flat.all(axis, keepdim=True)
    return (flat & ~inactive).view_as(zeros)


def _norm(tensors: list[Tensor]) -> Tensor:
    norm = torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()
    return norm.clamp_min(torch.finfo(norm.dtype).tiny)
