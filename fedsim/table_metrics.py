"""How many values of the rows of a table are right: pure functions over `row feature` in [0, 1].

A table's columns are told by how many features each has, in their order: 1 is a number, more are the categories of one
column, of which a row holds the one with the largest value. SciPy is imported where it is used, see `fedsim.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 0.319
"""By how many standard deviations a number may be off (Vero et al., TabLeak, ICML 2023)."""


ROUNDING = 1e-4
"""Share of its range by which a number may be off and still is exact."""


def right(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """`true claimed column`: whether a claimed row has the category of a true one, or its number within `TOLERANCE`.

    Args:
        claimed: `claimed feature`.
        true: `true feature`.
        columns: see above.
        deviations: `feature`, standard deviations of numbers; those of categories are not read.
    """
    parts = (torch.split(rows, list(columns), 1) for rows in (claimed, true, deviations[None]))
    return torch.stack(
        [
            _same(mine.argmax(1), theirs.argmax(1), 0) if mine.shape[1] > 1 else _same(mine[:, 0], theirs[:, 0], apart)
            for mine, theirs, apart in zip(*parts, strict=True)
        ],
        2,
    )


def _same(claimed: Tensor, true: Tensor, deviation: Tensor | int) -> Tensor:
    # Where public rows are all alike, or there is one, they say nothing of how far a number may be off.
    allowed = torch.nan_to_num(torch.as_tensor(TOLERANCE * deviation)).clamp_min(ROUNDING)
    return (claimed - true[:, None]).abs() <= allowed


def assigned(agreement: Tensor) -> Tensor:
    """`true`: the index of the claimed row assigned to each, so that the total agreement is largest; -1 is none.

    Args:
        agreement: `true claimed`, as the number of columns that are right.
    """
    from scipy.optimize import linear_sum_assignment

    places, chosen = (torch.from_numpy(index) for index in linear_sum_assignment(-agreement.double().numpy()))
    return torch.full((len(agreement),), -1).index_put((places,), chosen)


def columns_right(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """`true column`: whether the row that is assigned to each true one has it right; nothing is where none is assigned.

    Rows are assigned one-to-one so that as many values as possible are right. Arguments are those of `right`.
    """
    found = right(claimed, true, columns, deviations)
    chosen = assigned(found.sum(2))
    return found[torch.arange(len(true)), chosen.clamp_min(0)] & (chosen >= 0)[:, None]
