"""Findings about rows whose ids both sides know, as parties of a vertical federation do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class RowLabels(Finding):
    """Labels that an attack claims of rows; a row may be claimed once in each step.

    Attributes:
        rows: `claim`, ids.
        steps: `claim`, round of the step that the claim is from.
        scores: `claim class`, higher is likelier; comparable within a step.
        counted: number of rows of each step, where messages name none and `rows` are positions; else 0.
    """

    kind = "row-labels"
    rows: Tensor
    steps: Tensor
    scores: Tensor
    counted: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ids(self.rows, "rows")
        _check_ids(self.steps, "steps")
        if self.steps.shape != self.rows.shape:
            raise AttackError(f"the attack claims {len(self.rows)} rows in {len(self.steps)} steps, expected as many")
        _check_matrix(self.scores, len(self.rows), "scores")
        if self.scores.shape[1] < 2:
            raise AttackError("the attack scores one class, expected at least 2")


@dataclass(frozen=True, kw_only=True)
class RowFeatures(Finding):
    """Columns that an attack claims of rows, each row once.

    Attributes:
        rows: `row`, ids.
        data: `row feature` in [0, 1].
        counted: see `RowLabels`.
    """

    kind = "row-features"
    rows: Tensor
    data: Tensor
    counted: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ids(self.rows, "rows")
        if len(torch.unique(self.rows)) < len(self.rows):
            raise AttackError("the attack claims a row twice, expected each once")
        _check_matrix(self.data, len(self.rows), "data")
        if not (self.data.min() >= 0 and self.data.max() <= 1):
            raise AttackError("the attack claims data outside [0, 1]")


def _check_ids(ids: object, name: str) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise AttackError(f"the attack claims {name} that are not a vector of int64 with at least one entry")


def _check_matrix(values: object, count: int, name: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim != 2 or len(values) != count:
        raise AttackError(f"the attack claims {name} that are not floats for each of {count} claims")
    if not values.isfinite().all():
        raise AttackError(f"the attack claims {name} that are NaN or infinite")
