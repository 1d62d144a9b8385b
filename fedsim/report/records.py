"""Claimed rows of tables beside the true ones, in the units of the file, with differences marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.audit.evaluation.display import ClaimedWord, TableRows, TextPair
from fedsim.base.table_metrics import ROUNDING
from fedsim.data import Column, Dataset

MAX_RECORDS, MAX_COLUMNS = 5, 24
"""Limits on the rows and columns that are shown of a finding."""


@dataclass(frozen=True, kw_only=True)
class RecordCell:
    """Claimed value of one column.

    Attributes:
        right: whether it is the true one; True if that is unknown.
        entropy: how unsure the attack is of it; empty where it does not say.
    """

    text: str
    right: bool = True
    entropy: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One claimed row and the true one, which is empty if unknown."""

    claimed: Sequence[RecordCell]
    true: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ShownRecords:
    """Rows of a finding as the page shows them.

    Attributes:
        omitted_rows, omitted_columns: how many are not shown.
    """

    columns: Sequence[str]
    records: Sequence[Record]
    omitted_rows: int
    omitted_columns: int

    @property
    def has_entropy(self) -> bool:
        """True where the attack says how sure it is."""
        return any(cell.entropy for record in self.records for cell in record.claimed)

    @property
    def true(self) -> list[Sequence[str]]:
        """The true rows."""
        return [record.true for record in self.records]

    def as_text(self, place: int) -> TextPair:
        """Return one of the records as a text: each column with its value."""
        record = self.records[place]
        true = [f"{name} {text}" for name, text in zip(self.columns, record.true, strict=True)]
        pairs = zip(self.columns, record.claimed, strict=True)
        claimed = [ClaimedWord(text=f"{name} {cell.text}", right=cell.right) for name, cell in pairs]
        return TextPair(true=", ".join(true), claimed=claimed)


def shown_records(rows: TableRows, dataset: Dataset | None, places: Sequence[int] | None = None) -> ShownRecords:
    """Return some rows of a finding, with its first columns.

    Args:
        dataset: says what features mean; None if it is unknown, and values are then shares of the range.
    """
    named_columns = dataset.columns if dataset else ()
    columns = named_columns or tuple(
        Column(name=f"feature {number}", start=number) for number in range(rows.claimed.shape[1])
    )
    shown_columns, to_file_units = columns[:MAX_COLUMNS], dataset.from_unit_range if dataset else torch.clone
    row_numbers = list(range(min(MAX_RECORDS, len(rows.claimed)))) if places is None else list(places)
    claimed, true = rows.claimed[row_numbers], None if rows.true is None else rows.true[row_numbers]
    right = None if rows.right is None else rows.right[row_numbers]
    if right is None and true is not None:  # the spread of numbers is unknown
        right = (claimed - true).abs() <= ROUNDING
    # Cells and true texts, column by column.
    columns_of_cells = []
    for number, column in enumerate(shown_columns):
        columns_of_cells.append(_column_cells(column, to_file_units(claimed), right, number))
    if rows.entropy is not None and rows.entropy.shape[1] == len(columns):
        entropies = rows.entropy[row_numbers, : len(shown_columns)].T.tolist()
        columns_of_cells = [
            [replace(cell, entropy=f"{value:.2f}") for cell, value in zip(cells, values, strict=True)]
            for cells, values in zip(columns_of_cells, entropies, strict=True)
        ]
    columns_of_texts = []
    if true is not None:
        columns_of_texts = [_texts(column, to_file_units(true)) for column in shown_columns]
    # The same row by row.
    records_of_rows = []
    for position in range(len(claimed)):
        records_of_rows.append(
            Record(
                claimed=[cells[position] for cells in columns_of_cells],
                true=[texts[position] for texts in columns_of_texts],
            )
        )
    return ShownRecords(
        columns=[column.name for column in shown_columns],
        records=records_of_rows,
        omitted_rows=len(rows.claimed) - len(claimed),
        omitted_columns=len(columns) - len(shown_columns),
    )


def _column_cells(column: Column, claimed: Tensor, right: Tensor | None, number: int) -> list[RecordCell]:
    """Return the cells of column `number` of the claimed rows."""
    texts = _texts(column, claimed)
    marks = [True] * len(texts) if right is None else right[:, number].tolist()
    return [RecordCell(text=text, right=is_right) for text, is_right in zip(texts, marks, strict=True)]


def _texts(column: Column, inputs: Tensor) -> list[str]:
    """Format values as they are in the file; of a claimed row the likeliest category."""
    values = column.values(inputs.to(torch.float64))
    if column.categories:
        return [column.categories[int(value)] for value in values.tolist()]
    return [_figure(value) for value in values.tolist()]


def _figure(value: float) -> str:
    """Format with four digits or more, and without an exponent where an income needs none.

    >>> _figure(88104.2), _figure(0.31234)
    ('88104', '0.3123')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
