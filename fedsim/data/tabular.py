"""Tables from text: check every cell, encode columns as features, split rows by their content."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import re
import zlib
from collections.abc import Collection, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.randomness import numpy_generator
from fedsim.data import Column, Examples
from fedsim.data.holdout import count_held_out

MAX_CATEGORIES = 1000
"""Most categories of a column; with more it holds identifiers rather than categories."""

_MISSING_VALUES = frozenset(("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--", "."))
"""Texts of cells without a value, in lower case."""
_LEADING_ZERO = re.compile(r"-?0\d")
_DIGITS = r"(\d+([.,]\d+)?|\d{1,3}([.'\u2019\s]\d{3})+(,\d+)?|\d{1,3}([,'\u2019\s]\d{2,3})+(\.\d+)?)"
_SIGNED_NUMBER = re.compile(rf"[^\w\s<>=\u2264\u2265#]*\s?{_DIGITS}\s?[^\w\s<>=\u2264\u2265+]*")
"""A number with a sign of a currency, per cent or thousands, a decimal comma or a typographic minus.

Comparisons ('<30' and '65+'), dates and versions ('24.12.2026') are categories.
"""
_MOST_ROUNDING = 1e-3
"""Most that rounding to 64 bits may take of the spread of a column."""
_TOO_MANY_REMEDY = "name it in drop, or leave it out of categorical if it holds numbers"


def read_table(path: Path, separator: str = ",", names: Sequence[str] = (), comment: str = "") -> pd.DataFrame:
    """Read a table of text cells without blanks around them, indexed by the line of each row.

    Empty lines are left out. Python's csv reader is used because it knows the line it is on, which
    pandas does not tell, and repairs nothing silently.

    Args:
        path: UTF-8 text, compressed by gzip where it ends in `.gz`.
        separator: one character.
        names: names of the columns, if the first line is not a header.
        comment: lines that start with it are left out.
    """
    lines, rows = [], []
    header = list(names)
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
            for cells in reader:
                if not cells or (comment and cells[0].startswith(comment)):
                    continue
                cells = [cell.strip() for cell in cells]
                if not header:
                    header = cells
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells, expected {len(header)}, one a column; "
                        "correct it, or set the separator"
                    )
                lines.append(reader.line_num)
                rows.append(cells)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start} is {error.reason}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path}: is not readable ({error}); get the file again") from error
    if not header:
        raise DataError(f"{path}: is empty; its first line has to name the columns")
    for number, name in enumerate(header):
        if name in header[:number]:
            raise DataError(f"{path}: two columns are called '{name}'; rename one of them")
    return pd.DataFrame(rows, columns=header, index=lines, dtype=object)


def check_complete(path: Path, table: pd.DataFrame, allowed: Collection[str] = ()) -> pd.DataFrame:
    """Check that each column has a name and each cell a value, and return the table."""
    for name in table:
        if not name:
            raise DataError(f"{path}: a column has no name; write one into the first line, or name '' in drop")
        missing_values = _MISSING_VALUES.difference(allowed)
        if absent := [cell for cell in table[name].unique() if cell.lower() in missing_values]:
            is_missing = table[name].isin(absent)
            first = table[name].iloc[is_missing.argmax()]
            content = "no value" if first.lower() in ("", "nan") else f"'{first}', which stands for no value,"
            line, count = table.index[is_missing.argmax()], int(is_missing.sum())
            raise DataError(
                f"{path}: column '{name}' has {content} in line {line} ({count} in "
                "all); fill it, remove the line, name the column in drop, or write another word if it is a category"
            )
    return table


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def unify_numbers(column: pd.Series) -> pd.Series:
    """Return `column` with equal numbers written in the same way, the shortest that occurs.

    A cell that begins with a zero and further digits, such as `01`, is a code and stays as it is.

    >>> unify_numbers(pd.Series(["0.0", "0", "1", "01", "red"])).tolist()
    ['0', '0', '1', '01', 'red']
    >>> unify_numbers(pd.Series(["90071992547409920", "90071992547409921"])).nunique()  # one as floats
    2
    """
    cells = [cell for cell in column.unique() if not _LEADING_ZERO.match(cell)]
    spellings: dict[Decimal | float, list[str]] = {}
    for cell, value in zip(cells, _to_floats(cells).tolist(), strict=True):
        if not math.isnan(value):
            spellings.setdefault(_exact_number(cell, value), []).append(cell)
    shortest = {}
    for equal_cells in spellings.values():
        spelling = min(equal_cells, key=lambda text: (len(text), text))
        for cell in equal_cells:
            shortest[cell] = spelling
    return column.map(lambda cell: shortest.get(cell, cell))


def _exact_number(cell: str, value: float) -> Decimal | float:
    """Return the number in `cell` exactly, as floats are the same for ids of more than 15 digits; else `value`."""
    try:
        return Decimal(cell)
    except InvalidOperation:
        return value


def parse_numbers(path: Path, column: pd.Series) -> NDArray[np.float64]:
    """Parse the numbers of a column."""
    codes, cells = pd.factorize(column)  # parse each different cell once
    values = _to_floats(cells)
    is_wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if is_wrong.any():
        cell = cells[is_wrong.argmax()]
        line = column.index[(codes == is_wrong.argmax()).argmax()]
        raise DataError(
            f"{path}: column '{column.name}' holds '{cell}' in line {line}, expected a finite number; "
            "correct it, or name the column in categorical"
        )
    return np.asarray(values[codes])


def list_categories(path: Path, column: pd.Series, remedy: str = _TOO_MANY_REMEDY) -> tuple[str, ...]:
    """Return the different values of a column, sorted: numerically if all are numbers.

    Args:
        column: the column, as text.
        remedy: what to do if there are too many, the end of a sentence.
    """
    names = sorted(column.unique())
    if len(names) > MAX_CATEGORIES:
        raise DataError(
            f"{path}: column '{column.name}' holds {len(names)} different values, expected at most {MAX_CATEGORIES}; "
            f"{remedy}"
        )
    values = _to_floats(names)
    if np.isnan(values).any():
        return tuple(names)
    return tuple(names[index] for index in np.argsort(values, kind="stable"))


def _to_floats(cells: Sequence[str]) -> NDArray[np.float64]:
    """Convert cells to numbers, NaN where they are none."""
    return np.asarray(pd.to_numeric(np.asarray(cells, object), errors="coerce"), np.float64)


def encode_columns(
    path: Path, train: pd.DataFrame, test: pd.DataFrame, categorical: Collection[str] = ()
) -> tuple[Tensor, Tensor, tuple[Column, ...]]:
    """Encode the columns of a table as features in [0, 1].

    Numbers are scaled so that the smallest of `train` is 0 and the largest 1; those of `test` are
    clipped to that. A column with a single number becomes 0. Each category of either part becomes a
    feature that is 0 or 1.

    Args:
        test: rows to test on, with the same columns.
        categorical: columns of numbers to treat as categories; columns without any number are
            categories anyway.

    Returns:
        Features of `train` and of `test`, `example feature`, and the columns that they came from.
    """
    train_features: list[NDArray[np.float32]] = []
    test_features: list[NDArray[np.float32]] = []
    columns: list[Column] = []
    start = 0
    for name in train:
        cells = pd.concat([train[name], test[name]])
        if name in categorical or np.isnan(_to_floats(cells.unique())).all():
            # One feature a category.
            if name not in categorical and all(_SIGNED_NUMBER.fullmatch(cell) for cell in cells.unique()):
                raise DataError(
                    f"{path}: column '{name}' holds numbers with other signs, such as '{cells.iloc[0]}'; write digits, "
                    "a point and a minus alone, or name the column in categorical"
                )
            cells = unify_numbers(cells)
            names = list_categories(path, cells)
            column = Column(name=name, start=start, categories=names)
            codes = pd.Categorical(cells, categories=names).codes
            features = np.eye(len(names), dtype=np.float32)[codes]
        else:
            # One feature, scaled by the training rows.
            values = parse_numbers(path, cells)
            low, high = float(values[: len(train)].min()), float(values[: len(train)].max())
            _check_resolution(path, cells, values)
            column = Column(name=name, start=start, low=low, high=high)
            scaled = (values - low) / (high - low if high > low else 1.0)
            features = np.clip(scaled, 0, 1 if high > low else 0)[:, None].astype(np.float32)
        columns.append(column)
        start = column.features.stop
        train_features.append(features[: len(train)])
        test_features.append(features[len(train) :])
    train_tensor = torch.from_numpy(np.concatenate(train_features, axis=1))
    test_tensor = torch.from_numpy(np.concatenate(test_features, axis=1))
    return train_tensor, test_tensor, tuple(columns)


def _check_resolution(path: Path, cells: pd.Series, values: NDArray[np.float64]) -> None:
    """Raise DataError where 64 bits round the different numbers of a column by much of what they differ by."""
    spread, rounding = float(np.ptp(values)), float(np.spacing(np.abs(values).max())) / 2
    if rounding > _MOST_ROUNDING * spread and unify_numbers(cells).nunique() > 1:
        raise DataError(
            f"{path}: column '{cells.name}' holds different numbers near {values.max():g}, which 64 bits round by up "
            f"to {rounding:.3g}; subtract an offset, or name it in drop if it is an identifier"
        )


def numeric_columns(features: int) -> tuple[Column, ...]:
    """Return columns x0, x1, ... whose features are the numbers themselves, without scaling."""
    return tuple(Column(name=f"x{index}", start=index) for index in range(features))


def choose_test_rows(table: pd.DataFrame, fraction: float) -> NDArray[np.bool_]:
    """Choose the rows of a table to test on: at least one, and not all.

    They are those with the smallest hashes, so that neither order nor chance decides. Equal rows
    end up on the same side, except for at most one group of them.

    Returns:
        `row`, whether it is a test row.
    """
    hashes = []
    for row in table.itertuples(index=False, name=None):
        digest = hashlib.blake2b("\x1f".join(row).encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "big"))
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    count = min(int(count_held_out(len(table), fraction)), len(table) - 1)
    is_test = np.zeros(len(table), np.bool_)
    is_test[order[:count]] = True
    return is_test


def choose_examples(examples: Examples, limit: int | None, name: str) -> Examples:
    """Choose at most `limit` examples at random, and keep their order.

    A smaller choice is part of a larger one.

    Args:
        limit: how many, or None for all.
    """
    if limit is None or limit >= len(examples):
        return examples
    permutation = numpy_generator(name, "max_examples").permutation(len(examples))
    chosen = torch.from_numpy(np.sort(permutation[:limit]))
    groups = None if examples.groups is None else examples.groups[chosen]
    return Examples(raw=examples.raw[chosen], labels=examples.labels[chosen], scale=examples.scale, groups=groups)
