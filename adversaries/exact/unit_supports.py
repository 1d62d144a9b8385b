"""Which of the known examples changed a unit of the first layer: sparse sums of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_EXAMPLES = 6
"""Most examples that a unit's change is explained by."""
_MAX_ERROR = 1e-3
"""Largest error of a change, as a share of it, up to which it is explained."""
_FIT = 2.0
"""Root mean square of the standardised differences up to which a sum equals a change; 1 is expected."""
_NEEDED = 20.0
"""Least size of the part of each example, in errors of the whole change."""
_RIDGE = 1e-3
"""Singular values below this share of the largest are not amplified."""
_CHUNK = 4000
"""Units whose changes are explained at once."""


def find_supports(rows: Tensor, errors: Tensor, inputs: Tensor, input_errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return which examples changed each unit, and of which units all are known.

    A unit's change is a sum of the inputs that fired it, each with a one for the bias. Matching
    pursuit adds one example after the other. As images are alike, it works on changes that are
    whitened by the examples; the sum that it ends with is fitted and checked without that.

    Args:
        rows: `unit input+1`, changes of weights and bias.
        errors: `unit input+1`, their standard errors.
        inputs: `example input`, that are known.
        input_errors: `example`, the standard error of a value of each.

    Returns:
        `unit example`, whether the example is in the sum; and `unit`, whether the sum is complete.
    """
    supports = torch.zeros(len(rows), len(inputs), dtype=torch.bool)
    complete = torch.zeros(len(rows), dtype=torch.bool)
    if not len(inputs):
        return supports, complete
    atoms = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    whitening = _whiten(atoms)
    directions = torch.nn.functional.normalize(atoms @ whitening, dim=1)
    gram = atoms @ atoms.T
    atom_variances = input_errors.square() * inputs.shape[1]
    # With as many examples as values, any change would be a sum.
    most = min(_MAX_EXAMPLES, len(inputs), inputs.shape[1] - 1)
    is_precise = errors.norm(dim=1) <= _MAX_ERROR * rows.norm(dim=1)
    for units in is_precise.nonzero()[:, 0].split(_CHUNK):
        chosen = _pursue(rows[units] @ (whitening @ directions.T), directions @ directions.T, most)
        # Take the fewest examples that explain a change.
        for count in range(1, most + 1):
            members = chosen[:, :count]
            fits = _are_sums(rows[units], errors[units], atoms, gram, atom_variances, members)
            supports[units[fits, None], members[fits]] = True
            complete[units[fits]] = True
            units, chosen = units[~fits], chosen[~fits]
    return supports, complete


def _whiten(atoms: Tensor) -> Tensor:
    """Return the matrix after which the examples' directions are as unlike as can be."""
    _, values, directions = torch.linalg.svd(atoms, full_matrices=False)
    scales = values / (values.square() + (_RIDGE * values[0]) ** 2)
    whitening: Tensor = directions.T * scales @ directions
    return whitening


def _pursue(products: Tensor, gram: Tensor, count: int) -> Tensor:
    """Return `row choice`, the atoms that orthogonal matching pursuit chooses, in its order.

    Args:
        products: `row atom`, of each row with each atom.
        gram: `atom atom`, of the atoms with each other.
        count: number of choices.
    """
    chosen = torch.empty(len(products), 0, dtype=torch.long)
    residual_products = products
    for _ in range(count):
        scores = residual_products.abs().scatter(1, chosen, -1.0)
        chosen = torch.cat([chosen, scores.argmax(1, keepdim=True)], 1)
        weights = _solve(gram, products, chosen)
        residual_products = products - (weights[:, None] @ gram[chosen])[:, 0]
    return chosen


def _are_sums(
    rows: Tensor, errors: Tensor, atoms: Tensor, gram: Tensor, atom_variances: Tensor, members: Tensor
) -> Tensor:
    """Return `row`, which rows are sums of these atoms within errors, and of no fewer.

    Args:
        rows: `row input+1`.
        errors: `row input+1`.
        atoms: `atom input+1`.
        gram: `atom atom`, of the atoms with each other.
        atom_variances: `atom`, summed over their values.
        members: `row choice`, indices of atoms.
    """
    weights = _solve(gram, rows @ atoms.T, members)
    sums = torch.zeros(len(rows), len(atoms), dtype=rows.dtype).scatter(1, members, weights) @ atoms
    variances = errors.square().sum(1) + (weights.square() * atom_variances[members]).sum(1)
    fits = (rows - sums).square().sum(1) <= _FIT**2 * variances
    # A few wrong examples can stand for an unknown one whose part of the change is hardly more than rounding.
    squared_terms = weights.square() * gram.diagonal()[members]
    are_needed: Tensor = (squared_terms >= _NEEDED**2 * variances[:, None]).all(1)
    return fits & are_needed


def _solve(gram: Tensor, products: Tensor, members: Tensor) -> Tensor:
    """Return `row choice`, the weights of the atoms in the sum that is nearest to each row."""
    targets = products.gather(1, members)[:, :, None]
    grams = gram[members[:, :, None], members[:, None, :]]  # row choice choice
    solution: Tensor = torch.linalg.lstsq(grams, targets).solution
    weights: Tensor = solution[:, :, 0]
    return weights
