"""Unmixing of records: recover them from weighted sums whose weights are known."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

MAX_RECORDS = 10
"""Largest number of records, because all 2^N choices of signs are tried."""
_RIDGE = 1e-3
_SIGN_ROUNDS = 5
_ERROR_RATIO, _ERROR_SLACK = 3.0, 0.05
"""Two solutions explain a pixel equally well if the error of one is below three times the other's
plus a twentieth of the mixtures' squares."""


def unmix_records(mixtures: Tensor, weights: Tensor, low: Tensor, high: Tensor, *, signs_lost: bool) -> Tensor:
    """Find the records, `record pixel`, by least squares, with each pixel clamped to its range.

    If signs are lost, the solutions for all choices of signs of one round's mixtures are improved
    by turns of the signs and of the records; the best is kept pixel by pixel.

    Args:
        mixtures: `round mixture pixel`, in the model's range.
        weights: `round mixture record`.
        low: `pixel`, lowest value.
        high: `pixel`, highest value.
        signs_lost: the signs of `mixtures` mean nothing.
    """
    values, all_weights = mixtures.flatten(0, 1), weights.flatten(0, 1)
    solver = _least_squares_solver(all_weights)
    if not signs_lost:
        return (solver @ values).clamp(low, high)
    sizes = values.abs()
    best = torch.zeros(all_weights.shape[1], sizes.shape[1]).to(sizes)
    least_error = torch.full_like(best[0], torch.inf)
    for round_sizes, round_weights in zip(mixtures.abs(), weights, strict=True):
        for start in _solutions_by_signs(round_sizes, round_weights):
            # Improve signs and records in turn.
            records = start.clamp(low, high)
            for _ in range(_SIGN_ROUNDS):
                signed = torch.where(all_weights @ records < 0, -sizes, sizes)
                records = (solver @ signed).clamp(low, high)
            # Keep the better solution of each pixel.
            error = _squared_error(records, all_weights, sizes)
            best = torch.where(error < least_error, records, best)
            least_error = torch.minimum(error, least_error)
    return _prefer_darker(best, least_error, all_weights, sizes, low, high)


def _least_squares_solver(weights: Tensor) -> Tensor:
    """Return `record mixture`, the least-squares inverse; a small ridge keeps it finite."""
    squares = weights.mT @ weights
    ridge = _RIDGE * torch.eye(len(squares)).to(squares)
    solver: Tensor = torch.linalg.solve(squares + ridge, weights.mT)
    return solver


def _solutions_by_signs(sizes: Tensor, weights: Tensor) -> Tensor:
    """Return `choice record pixel`, the solution of one round for each choice of signs."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(sizes)))).to(sizes)
    return _least_squares_solver(weights) @ (signs[:, :, None] * sizes)


def _squared_error(records: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Return `pixel`, the squared error of the mixtures' absolute values."""
    return ((weights @ records).abs() - sizes).square().sum(0)


def _prefer_darker(records: Tensor, error: Tensor, weights: Tensor, sizes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Negate pixels that explain absolute values equally well negated, and are darker then."""
    negated = (-records).clamp(low, high)
    limit = _ERROR_RATIO * error + _ERROR_SLACK * sizes.square().sum(0)
    equally_good = _squared_error(negated, weights, sizes) < limit
    return torch.where(equally_good & (negated.sum(0) < records.sum(0)), negated, records)
