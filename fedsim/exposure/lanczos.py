"""Lanczos iteration: Gauss quadrature of a spectrum, and where power iteration would be."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from fedsim.exposure.hessian import Hessian

_NOTHING_LEFT = 1e-7
"""Of the largest number in the tridiagonal matrix: what is left below this is float32's rounding."""
_FAR = 16.0
"""exp of minus this is the share of a power iteration that is left out, a ten-millionth."""


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
    values, vectors, _ = _ritz(hessian, rows / rows.norm(dim=1, keepdim=True), min(steps, hessian.size))
    shape = (*starts.shape[:-1], -1)
    return values.clamp_min(0).reshape(shape), vectors[:, 0].square().reshape(shape)


def shifted_smallest(hessian: Hessian, steps: int) -> float:
    """What power iteration with `steps` steps on lambda_max I - H leaves of the smallest eigenvalue.

    It approaches the smallest from above, and is no eigenvalue before; where that is 0, it falls as 1 / steps. Where
    power iteration would be, (lambda_max I - H)^steps v, is computed at once from fewer products. As a function of
    an eigenvalue between 0 and lambda_max, (lambda_max - .)^steps is a polynomial of degree k but for less than
    2 exp(-k^2 / steps) of its largest value, since its coefficients in Chebyshev polynomials are binomial; and Lanczos
    iteration with k + 1 steps finds what polynomials of degree k make of a vector.

    Args:
        hessian: positive semi-definite, with a largest eigenvalue above 0.
        steps: of power iteration, at least 1; about 4 sqrt(steps) products are taken.

    References:
        Saad: Analysis of Some Krylov Subspace Approximations to the Matrix Exponential Operator, 1992; Sachdeva and
        Vishnoi: Faster Algorithms via Approximation Theory, 2014, Section 3, for the degree.
    """
    vector = hessian.start[None] / hessian.start.norm()
    products = min(steps, ceil(sqrt(_FAR * steps))) + 1
    (values,), (vectors,), (basis,) = _ritz(hessian, vector, min(products, hessian.size))
    shifted = (hessian.largest - values).clamp_min(0)
    if shifted.any():  # else the largest is the only one
        shares = (shifted / shifted.max()) ** steps
        vector = (vectors @ (shares * vectors[0]))[None] @ basis
    (left,) = (vector / vector.norm()).to(hessian.sent.vector.dtype)
    return float(hessian.push(left).double().square().sum())


def _ritz(hessian: Hessian, vectors: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of `start number`, of length 1: eigenvalues and eigenvectors in a basis, and this, `start step number`.

    The eigenvectors are `start step eigenvalue`, and the first vector of the basis is the start.
    """
    diagonal, beside, basis = _tridiagonal(hessian, vectors, steps)
    whole = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    return *torch.linalg.eigh(whole), basis


def _tridiagonal(hessian: Hessian, vectors: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Its diagonal, `start step`, what is beside it, one shorter, and the basis, from starts of length 1.

    Where nothing but rounding is left of a direction it is zero, and so is all that follows; it ends where all are.
    """
    dtype = hessian.sent.vector.dtype
    taken = hessian.sent.bytes_of_derivative + steps * vectors.nbytes
    hessian.sent.check_memory(f"the derivative with {steps} steps of Lanczos iteration", taken)
    basis = vectors.new_zeros(len(vectors), steps, hessian.size)
    diagonal, beside = vectors.new_zeros(len(vectors), steps), vectors.new_zeros(len(vectors), steps)
    for step in range(steps):
        basis[:, step] = vectors
        known = basis[:, : step + 1]
        made = _times(hessian, vectors.to(dtype)).double()
        diagonal[:, step] = (made * vectors).sum(1)
        for _ in range(2):
            made = made - ((known @ made[..., None]).mT @ known).squeeze(1)
        length, largest = made.norm(dim=1), torch.maximum(diagonal, beside).amax(1)
        beside[:, step] = torch.where(length > _NOTHING_LEFT * largest, length, 0)
        vectors = torch.where(beside[:, step, None] > 0, made / length[:, None], 0)
        if not vectors.any():
            break
    return diagonal[:, : step + 1], beside[:, :step], known


def _times(hessian: Hessian, rows: Tensor) -> Tensor:
    return (hessian @ rows[0])[None] if len(rows) == 1 else hessian @ rows  # one product is quicker by itself
