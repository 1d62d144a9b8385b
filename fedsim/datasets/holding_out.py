"""Test examples for data that come without any."""

from __future__ import annotations

import torch
from torch import Tensor


def every_nth(labels: Tensor, fraction: float) -> Tensor:
    """`example`, whether it is a test example: `fraction` of all, spread evenly and without chance.

    Examples are taken in the order of their classes, within a class in their own. So a class gives its
    share, give or take one, and classes of one example give the same share together.

    Args:
        labels: `example`, class indices.
        fraction: of test examples, in (0, 1); 0.2 takes every fifth.
    """
    order = labels.argsort(stable=True)
    # The small number undoes rounding: 29 of 100 are 28.999... in floating point.
    share = torch.arange(len(labels) + 1, dtype=torch.float64).mul(fraction).add(1e-9).floor()
    held_out = torch.empty(len(labels), dtype=torch.bool)
    held_out[order] = share.diff() > 0
    return held_out
