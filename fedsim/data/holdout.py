"""Choice of test examples for data that come without any."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def count_held_out(counts: ArrayLike, fraction: float) -> NDArray[np.int64]:
    """Return how many of so many examples, or of each of several counts, are held out: the fraction, rounded up.

    What rounding adds does not count: 0.07 of 100 are 7.000000000000001 in floating point.

    >>> count_held_out([100, 10], 0.07).tolist()
    [7, 1]
    """
    rounded_up: NDArray[np.int64] = np.ceil((np.asarray(counts) * fraction).round(9)).astype(np.int64)
    return rounded_up


def choose_evenly(labels: Tensor, fraction: float) -> Tensor:
    """Choose a fraction of all examples to test on, evenly over the classes and without chance.

    Examples are taken in the order of their classes, within a class in the order of the data. A
    class therefore gives its share, give or take one, and classes of one example give that share
    together.

    Args:
        labels: `example`, class indices.
        fraction: share of test examples, in (0, 1); 0.2 takes every fifth.

    Returns:
        `example`, whether it is a test example.

    >>> choose_evenly(torch.tensor([0, 0, 1, 1, 0, 1]), fraction=1 / 3).tolist()
    [False, False, False, False, True, True]
    """
    order = labels.argsort(stable=True)
    # The small number undoes rounding: 29 of 100 are 28.999... in floating point.
    share = torch.arange(len(labels) + 1, dtype=torch.float64).mul(fraction).add(1e-9).floor()
    held_out = torch.empty(len(labels), dtype=torch.bool)
    held_out[order] = share.diff() > 0
    return held_out


def choose_distinct(raw: Tensor, labels: Tensor, fraction: float) -> Tensor:
    """Choose test examples as `choose_evenly` does, of which none equals one to train on.

    Examples with equal inputs count as one of the first one's class, and stay on one side.

    Args:
        raw: `example ...`, the inputs.
        labels: as of `choose_evenly`.
        fraction: likewise.

    >>> choose_distinct(torch.tensor([[7], [8], [7], [9], [9]]), torch.zeros(5), fraction=1 / 3).tolist()
    [False, False, False, True, True]
    """
    numbers: dict[bytes, int] = {}
    kinds, first_rows = [], []
    for row, values in enumerate(raw.numpy()):
        digest = blake2b(values.tobytes(), digest_size=16).digest()
        if digest not in numbers:
            numbers[digest] = len(numbers)
            first_rows.append(row)
        kinds.append(numbers[digest])
    return choose_evenly(labels[first_rows], fraction)[kinds]
