"""Lanczos iteration as Gauss quadrature of a spectrum."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.exposure.hessian import Hessian

_NOTHING_LEFT = 1e-7
"""Of the largest number in the tridiagonal matrix: what is left below this is float32's rounding."""


def lanczos(hessian: Hessian, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Points and weights with start' f(H) start / |start|^2 = sum of weight x f(point), about, for smooth f.

    Each new direction is made orthogonal to all before it, twice, so that no eigenvalue is counted again. SciPy has no
    such routine: `eigsh` keeps the tridiagonal matrix to itself, and that is what the quadrature is made of.

    Args:
        hessian: positive semi-definite.
        start: `number`, not zero.
        steps: products at most; fewer where they already span everything that H makes of `start`.

    Returns:
        `point` eigenvalue estimates of at least 0, and `point` weights that add up to 1, in float64.

    References:
        Golub and Welsch 1969; Ubaru, Chen and Saad 2017, Section 3.
    """
    basis = [start.double() / start.double().norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(steps, hessian.size)):
        made = (hessian @ basis[-1].to(hessian.sent.vector.dtype)).double()
        diagonal.append(made @ basis[-1])
        spanned = torch.stack(basis)
        for _ in range(2):
            made = made - spanned.T @ (spanned @ made)
        beside.append(made.norm())
        if beside[-1] <= _NOTHING_LEFT * torch.stack(diagonal + beside[:-1]).abs().max():
            break
        basis.append(made / beside[-1])
    off = torch.stack(beside[: len(diagonal) - 1]) if len(diagonal) > 1 else torch.empty(0, dtype=torch.float64)
    matrix = torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0), vectors[0].square()
