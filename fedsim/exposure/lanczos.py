"""Lanczos iteration on a Hessian: Gauss quadrature of its spectrum, and its smallest eigenvalue."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from fedsim.exposure.hessian import Hessian

_BREAKDOWN = 1e-7
"""A new direction shorter than this, relative to the largest entry so far, is rounding only."""
_NEGLECTED_EXPONENT = 16.0
"""The neglected part of a power iteration is exp(-16) of it, a ten-millionth."""


def lanczos_quadrature(hessian: Hessian, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Compute the Gauss quadrature of a Hessian's spectrum as seen from a start vector.

    For smooth f, start' f(H) start / |start|^2 is about the sum of weight x f(point). Each new
    direction is made orthogonal to all before it, twice, so that no eigenvalue is counted again.
    SciPy has no such routine: `eigsh` does not return the tridiagonal matrix, of which the
    quadrature is made.

    Args:
        hessian: positive semi-definite.
        starts: `number`, not zero; or `start number`, which takes all those products at once.
        steps: products for each start. Where fewer span the whole Krylov space, the points that
            remain have weight 0.

    Returns:
        `[start] point` eigenvalue estimates of at least 0, and as many weights that add up to 1,
        both in float64.

    References:
        [Golub1969]; [Ubaru2017], Sect. 3.
    """
    rows = starts.double().reshape(-1, hessian.size)
    unit_rows = rows / rows.norm(dim=1, keepdim=True)
    values, vectors, _ = _ritz_pairs(hessian, unit_rows, min(steps, hessian.size))
    shape = (*starts.shape[:-1], -1)
    return values.clamp_min(0).reshape(shape), vectors[:, 0].square().reshape(shape)


def smallest_by_power_iteration(hessian: Hessian, steps: int) -> float:
    """Estimate the smallest eigenvalue as power iteration on lambda_max I - H does after `steps`.

    The estimate approaches the smallest eigenvalue from above and is no eigenvalue before; where
    that is 0, it falls as 1 / steps. The vector (lambda_max I - H)^steps v at which power iteration
    arrives is computed at once from fewer products. As a function of an eigenvalue between 0 and
    lambda_max, (lambda_max - .)^steps is a polynomial of degree k but for less than
    2 exp(-k^2 / steps) of its largest value, since its coefficients in Chebyshev polynomials are
    binomial; and k + 1 steps of Lanczos iteration apply any polynomial of degree k to a vector.

    Args:
        hessian: positive semi-definite, with a largest eigenvalue above 0.
        steps: of power iteration, at least 1; about 4 sqrt(steps) products are computed.

    References:
        [Saad1992]; [Sachdeva2014], Sect. 3, for the degree.
    """
    vector = hessian.start_vector[None] / hessian.start_vector.norm()
    products = min(steps, ceil(sqrt(_NEGLECTED_EXPONENT * steps))) + 1
    (values,), (vectors,), (basis,) = _ritz_pairs(hessian, vector, min(products, hessian.size))
    shifted = (hessian.largest_eigenvalue - values).clamp_min(0)
    if shifted.any():  # otherwise the largest is the only eigenvalue
        factors = (shifted / shifted.max()) ** steps
        vector = (vectors @ (factors * vectors[0]))[None] @ basis
    (direction,) = (vector / vector.norm()).to(hessian.message.vector.dtype)
    return float(hessian.apply_root(direction).double().square().sum())


def _ritz_pairs(hessian: Hessian, vectors: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues and eigenvectors in the Krylov basis of each unit start, and that basis.

    The start is the first vector of the basis.

    Args:
        vectors: `start number`, of length 1.

    Returns:
        `start step`, `start step eigenvalue` and `start step number`.
    """
    diagonal, off_diagonal, basis = _tridiagonalise(hessian, vectors, steps)
    upper, lower = torch.diag_embed(off_diagonal, 1), torch.diag_embed(off_diagonal, -1)
    matrix = torch.diag_embed(diagonal) + upper + lower
    return *torch.linalg.eigh(matrix), basis


def _tridiagonalise(hessian: Hessian, vectors: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the diagonal `start step`, the off-diagonal, one shorter, and the Krylov basis.

    Where a new direction is rounding only, it is set to zero and so are all that follow; the
    iteration ends where that holds for each start.
    """
    dtype = hessian.message.vector.dtype
    needed = hessian.message.jacobian_bytes + steps * vectors.nbytes
    hessian.message.check_memory(f"the derivative with {steps} steps of Lanczos iteration", needed)
    basis = vectors.new_zeros(len(vectors), steps, hessian.size)
    diagonal = vectors.new_zeros(len(vectors), steps)
    off_diagonal = vectors.new_zeros(len(vectors), steps)
    for step in range(steps):
        basis[:, step] = vectors
        previous = basis[:, : step + 1]
        products = _multiply_rows(hessian, vectors.to(dtype)).double()
        diagonal[:, step] = (products * vectors).sum(1)
        # Orthogonalise twice: once leaves rounding that grows from step to step.
        for _ in range(2):
            products = products - ((previous @ products[..., None]).mT @ previous).squeeze(1)
        norms, largest = products.norm(dim=1), torch.maximum(diagonal, off_diagonal).amax(1)
        off_diagonal[:, step] = torch.where(norms > _BREAKDOWN * largest, norms, 0)
        vectors = torch.where(off_diagonal[:, step, None] > 0, products / norms[:, None], 0)
        if not vectors.any():
            break
    return diagonal[:, : step + 1], off_diagonal[:, :step], previous


def _multiply_rows(hessian: Hessian, rows: Tensor) -> Tensor:
    # A single product is quicker without the vectorised path.
    return (hessian @ rows[0])[None] if len(rows) == 1 else hessian @ rows
