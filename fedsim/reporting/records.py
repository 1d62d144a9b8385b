"""Rows of tables that were claimed, beside the true ones: in the units of the file, differences marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.datasets import Column, Dataset
from fedsim.evaluation.kind import Pair, Rows, Word
from fedsim.table_metrics import ROUNDING

RECORDS, COLUMNS = 5, 24
"""Most rows shown of a finding, and most columns."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A value, whether it is the true one (true where nobody knows), and how unsure the attack is (empty if unsaid)."""

    text: str
    right: bool = True
    entropy: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One claimed row, `column`, and the true one; empty where nobody knows it."""

    claimed: Sequence[Cell]
    true: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Records:
    """What is shown of a finding of rows.

    Attributes:
        columns: their names.
        records: the first rows.
        left_rows, left_columns: how many are not shown.
    """

    columns: Sequence[str]
    records: Sequence[Record]
    left_rows: int
    left_columns: int

    @property
    def unsure(self) -> bool:
        """Whether the attack says how sure it is."""
        return any(cell.entropy for record in self.records for cell in record.claimed)

    @property
    def true(self) -> list[Sequence[str]]:
        """The true rows."""
        return [record.true for record in self.records]

    def as_text(self, place: int) -> Pair:
        """One of the records as a text: each column with its value."""
        record = self.records[place]
        true = [f"{name} {text}" for name, text in zip(self.columns, record.true, strict=True)]
        pairs = zip(self.columns, record.claimed, strict=True)
        claimed = [Word(text=f"{name} {cell.text}", right=cell.right) for name, cell in pairs]
        return Pair(true=", ".join(true), claimed=claimed)


def records(rows: Rows, dataset: Dataset | None, places: Sequence[int] | None = None) -> Records:
    """Some rows of a finding, and the first columns.

    Args:
        rows: what is claimed, and what is true.
        dataset: says what features mean; None where nobody does, and values are then shares of the range.
        places: of the rows; None for the first ones.
    """
    known = dataset.columns if dataset else ()
    columns = known or tuple(Column(name=f"feature {place}", start=place) for place in range(rows.claimed.shape[1]))
    shown, in_file = columns[:COLUMNS], dataset.from_unit_range if dataset else torch.clone
    chosen = list(range(min(RECORDS, len(rows.claimed)))) if places is None else list(places)
    claimed, true = rows.claimed[chosen], None if rows.true is None else rows.true[chosen]
    right = None if rows.right is None else rows.right[chosen]
    if right is None and true is not None:  # nobody says how far numbers are spread
        right = (claimed - true).abs() <= ROUNDING
    cells = [_column(column, in_file(claimed), right, place) for place, column in enumerate(shown)]
    if rows.entropy is not None and rows.entropy.shape[1] == len(columns):
        told = rows.entropy[chosen, : len(shown)].T.tolist()
        pairs = (zip(*pair, strict=True) for pair in zip(cells, told, strict=True))
        cells = [[replace(cell, entropy=f"{value:.2f}") for cell, value in pair] for pair in pairs]
    texts = [_texts(column, in_file(true)) for column in shown] if true is not None else []
    return Records(
        columns=[column.name for column in shown],
        records=[
            Record(claimed=[own[place] for own in cells], true=[own[place] for own in texts])
            for place in range(len(claimed))
        ],
        left_rows=len(rows.claimed) - len(claimed),
        left_columns=len(columns) - len(shown),
    )


def _column(column: Column, claimed: Tensor, right: Tensor | None, place: int) -> list[Cell]:
    """One column of the claimed rows, the one at `place`."""
    texts = _texts(column, claimed)
    marks = [True] * len(texts) if right is None else right[:, place].tolist()
    return [Cell(text=text, right=ok) for text, ok in zip(texts, marks, strict=True)]


def _texts(column: Column, inputs: Tensor) -> list[str]:
    """Values as they are in the file; of a claimed row the likeliest category."""
    values = column.values(inputs.to(torch.float64))
    if column.categories:
        return [column.categories[int(value)] for value in values.tolist()]
    return [f"{value:.4g}" for value in values.tolist()]
