"""Lanczos iteration as Gauss quadrature of a spectrum."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.exposure.hessian import Hessian

_NOTHING_LEFT = 1e-7
"""Of the largest number in the tridiagonal matrix: what is left below this is float32's rounding."""


def lanczos(hessian: Hessian, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Points and weights with start' f(H) start / |start|^2 = sum of weight x f(point), about, for smooth f.

    Each new direction is made orthogonal to all before it, twice, so that no eigenvalue is counted again. SciPy has no
    such routine: `eigsh` keeps the tridiagonal matrix to itself, and that is what the quadrature is made of.

    Args:
        hessian: positive semi-definite.
        starts: `number`, not zero; or `start number`, which takes all those products at once.
        steps: products of each start; where fewer span all that H makes of it, the points that are left have weight 0.

    Returns:
        `[start] point` eigenvalue estimates of at least 0, and as many weights that add up to 1, in float64.

    References:
        Golub and Welsch 1969; Ubaru, Chen and Saad 2017, Section 3.
    """
    rows = starts.double().reshape(-1, hessian.size)
    diagonal, beside = _tridiagonal(hessian, rows / rows.norm(dim=1, keepdim=True), min(steps, hessian.size))
    whole = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(whole)
    shape = (*starts.shape[:-1], -1)
    return values.clamp_min(0).reshape(shape), vectors[:, 0].square().reshape(shape)


def _tridiagonal(hessian: Hessian, vectors: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Its diagonal, `start step`, and what is beside it, one shorter, from starts of length 1.

    Where nothing but rounding is left of a direction it is zero, and so is all that follows; it ends where all are.
    """
    dtype = hessian.sent.vector.dtype
    basis = vectors.new_zeros(len(vectors), steps, hessian.size)
    diagonal, beside = vectors.new_zeros(len(vectors), steps), vectors.new_zeros(len(vectors), steps)
    for step in range(steps):
        basis[:, step] = vectors
        made = _times(hessian, vectors.to(dtype)).double()
        diagonal[:, step] = (made * vectors).sum(1)
        for _ in range(2):
            made = made - ((basis @ made[..., None]).mT @ basis).squeeze(1)
        length, largest = made.norm(dim=1), torch.maximum(diagonal, beside).amax(1)
        beside[:, step] = torch.where(length > _NOTHING_LEFT * largest, length, 0)
        vectors = torch.where(beside[:, step, None] > 0, made / length[:, None], 0)
        if not vectors.any():
            break
    return diagonal[:, : step + 1], beside[:, :step]


def _times(hessian: Hessian, rows: Tensor) -> Tensor:
    return (hessian @ rows[0])[None] if len(rows) == 1 else hessian @ rows  # one product is quicker by itself
