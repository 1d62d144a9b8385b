"""Correct values in claimed rows of a table: pure functions of `row feature` in [0, 1].

The columns of a table are described by their numbers of features, in order: 1 for a number, more
for a categorical column, whose value in a row is the category with the largest feature. SciPy is
imported where it is used, see `fedsim.base.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 0.319
"""Largest error of a correct number, in standard deviations (TabLeak [Vero2023])."""
ROUNDING = 1e-4
"""Largest error of an exact number, as a share of its range."""


def compare_rows(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """Compare each claimed row with each true row: equal categories, numbers within `TOLERANCE`.

    Args:
        claimed: `claimed feature`.
        true: `true feature`.
        columns: number of features of each column.
        deviations: `feature`, standard deviations of numbers; those of categories are not read.

    Returns:
        `true claimed column`, whether the value is correct.
    """
    return compare_aligned_rows(claimed[None], true[:, None], columns, deviations)


def compare_aligned_rows(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """Compare each claimed row with the true row in its place, as `compare_rows` does with all.

    Returns:
        `... column`, whether the value is correct, of `... feature` that broadcast.
    """
    claimed_columns = torch.split(claimed, list(columns), -1)
    true_columns = torch.split(true, list(columns), -1)
    column_deviations = torch.split(deviations, list(columns))
    is_correct = []
    for claimed_values, true_values, deviation in zip(claimed_columns, true_columns, column_deviations, strict=True):
        if claimed_values.shape[-1] > 1:
            is_correct.append(claimed_values.argmax(-1) == true_values.argmax(-1))
        else:
            # The deviation is 0 where all public rows are equal, and NaN where there is only one.
            allowed = torch.nan_to_num(TOLERANCE * deviation).clamp_min(ROUNDING)
            is_correct.append((claimed_values[..., 0] - true_values[..., 0]).abs() <= allowed)
    return torch.stack(is_correct, -1)


def assign_rows(agreement: Tensor) -> Tensor:
    """Return the index of the claimed row assigned to each true row; most agreement in total.

    Args:
        agreement: `true claimed`, for example the number of correct columns.

    Returns:
        `true`, -1 where no claimed row is left.
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(-agreement.double().numpy()))
    return torch.full((len(agreement),), -1).index_put((rows,), columns)


def find_correct_columns(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """Return the correct values of each true row in the claimed row that is assigned to it.

    Rows are assigned one-to-one so that as many values as possible are correct. Arguments are those
    of `compare_rows`.

    Returns:
        `true column`, whether the value is correct; all false where no claimed row is assigned.
    """
    is_correct = compare_rows(claimed, true, columns, deviations)
    chosen = assign_rows(is_correct.sum(2))
    return is_correct[torch.arange(len(true)), chosen.clamp_min(0)] & (chosen >= 0)[:, None]
