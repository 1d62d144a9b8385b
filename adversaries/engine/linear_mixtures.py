"""Records from mixtures of them whose weights are known, and whose signs may be lost."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

MOST = 10
"""Most records, where all 2^N choices of signs are tried."""
_RIDGE = 1e-3
_TURNS = 5
_ALIKE, _SLACK = 3.0, 0.05
"""Two solutions explain a pixel equally well where one leaves less than three times as much over as the other, and
a twentieth of the mixtures' squares."""


def records_of(mixtures: Tensor, weights: Tensor, low: Tensor, high: Tensor, *, flipped: bool) -> Tensor:
    """`record pixel`: what `mixtures` are weighted sums of, in the sense of least squares, each pixel in its range.

    Args:
        mixtures: `round mixture pixel`, in model units.
        weights: `round mixture record`.
        low: `pixel`, lowest value.
        high: `pixel`, highest value.
        flipped: the signs of `mixtures` mean nothing.
    """
    seen, shares = mixtures.flatten(0, 1), weights.flatten(0, 1)
    solve = _solver(shares)
    if not flipped:
        return (solve @ seen).clamp(low, high)
    seen = seen.abs()
    best = torch.zeros(shares.shape[1], seen.shape[1]).to(seen)
    least = torch.full_like(best[0], torch.inf)
    for own, part in zip(mixtures.abs(), weights, strict=True):
        for start in _starts(own, part):
            found = start.clamp(low, high)
            for _ in range(_TURNS):
                found = (solve @ torch.where(shares @ found < 0, -seen, seen)).clamp(low, high)
            left = _left(found, shares, seen)
            best, least = torch.where(left < least, found, best), torch.minimum(left, least)
    return _darker(best, least, shares, seen, low, high)


def _solver(shares: Tensor) -> Tensor:
    """`record mixture`: what least squares multiplies mixtures with; a small ridge keeps it finite."""
    squares = shares.mT @ shares
    solver: Tensor = torch.linalg.solve(squares + _RIDGE * torch.eye(len(squares)).to(squares), shares.mT)
    return solver


def _starts(mixtures: Tensor, weights: Tensor) -> Tensor:
    """`choice record pixel`: the solution of one round for each choice of signs of its mixtures."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(mixtures)))).to(mixtures)
    return _solver(weights) @ (signs[:, :, None] * mixtures)


def _left(records: Tensor, shares: Tensor, seen: Tensor) -> Tensor:
    """`pixel`: squares of what `records` leave unexplained of absolute values."""
    return ((shares @ records).abs() - seen).square().sum(0)


def _darker(records: Tensor, left: Tensor, shares: Tensor, seen: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Of a pixel and the same with all signs turned, which explain absolute values alike, the darker one."""
    turned = (-records).clamp(low, high)
    alike = _left(turned, shares, seen) < _ALIKE * left + _SLACK * seen.square().sum(0)
    return torch.where(alike & (turned.sum(0) < records.sum(0)), turned, records)
