"""Tables from text: read with every cell checked, made into features, split by what the rows hold."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import re
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.datasets import Column, Examples
from fedsim.errors import DataError
from fedsim.randomness import numpy_generator

MOST_CATEGORIES = 1000
"""More in one column are names or numbers of things rather than kinds of them."""

_MISSING = frozenset(("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--", "."))
"""What cells without a value hold, in small letters."""
_CODE = re.compile(r"-?0\d")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_TOO_MANY = "name it in drop, or leave it out of categorical if it holds numbers"


def read_table(path: Path, separator: str = ",", names: Sequence[str] = (), comment: str = "") -> pd.DataFrame:
    """Every cell as text without blanks around it; the index holds the number of each row's line.

    Python's csv reader knows the line it is on, which pandas forgets, and repairs nothing silently.
    Empty lines are left out.

    Args:
        path: UTF-8 text, with gzip's compression where it ends in `.gz`.
        separator: one character.
        names: of the columns, if the first line is not a header.
        comment: lines that start with it are left out.

    Raises:
        DataError: it is no such text, two columns share a name, or a line has more or fewer cells than the header.
    """
    lines, rows = [], []
    header = list(names)
    try:
        with _open(path) as file:
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


def complete(path: Path, table: pd.DataFrame, known: Collection[str] = ()) -> pd.DataFrame:
    """`table` again, if each of its columns has a name and each cell a value.

    Args:
        path: of the file.
        table: as `read_table` gives it.
        known: words for no value that whoever calls knows of.

    Raises:
        DataError: a column has no name, or a cell is empty or says that it has no value.
    """
    for name in table:
        if not name:
            raise DataError(f"{path}: a column has no name; write one into the first line, or name '' in drop")
        if absent := [cell for cell in table[name].unique() if cell.lower() in _MISSING.difference(known)]:
            missing = table[name].isin(absent)
            first = table[name].iloc[missing.argmax()]
            what = "no value" if first.lower() in ("", "nan") else f"'{first}', which stands for no value,"
            raise DataError(
                f"{path}: column '{name}' has {what} in line {table.index[missing.argmax()]} ({int(missing.sum())} in "
                "all); fill it, remove the line, name the column in drop, or write another word if it is a category"
            )
    return table


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def with_equal_numbers_alike(column: pd.Series) -> pd.Series:
    """Return `column` with each number written in one way, the shortest of those in it: `0` for `0.0`.

    What begins with a zero and goes on with digits, such as `01`, is a code and stays as it is.
    """
    cells = [cell for cell in column.unique() if not _CODE.match(cell)]
    writings: dict[float, list[str]] = {}
    for cell, value in zip(cells, _parsed(cells).tolist(), strict=True):
        if not math.isnan(value):
            writings.setdefault(value, []).append(cell)
    shortest = {cell: min(alike, key=lambda text: (len(text), text)) for alike in writings.values() for cell in alike}
    return column.map(lambda cell: shortest.get(cell, cell))


def numbers(path: Path, column: pd.Series) -> NDArray[np.float64]:
    """The numbers in `column`.

    Raises:
        DataError: a cell is no number, or too large for a 32-bit one.
    """
    codes, cells = pd.factorize(column)  # a cell is often repeated, and reading it takes time
    known = _parsed(cells)
    bad = ~(np.abs(known) <= np.finfo(np.float32).max)
    if bad.any():
        cell = cells[bad.argmax()]
        line = column.index[(codes == bad.argmax()).argmax()]
        raise DataError(
            f"{path}: column '{column.name}' holds '{cell}' in line {line}, expected a finite number; "
            "correct it, or name the column in categorical"
        )
    return np.asarray(known[codes])


def categories(path: Path, column: pd.Series, remedy: str = _TOO_MANY) -> tuple[str, ...]:
    """The different values in `column`, sorted, by size if they are numbers.

    Args:
        remedy: what to do if there are too many, the end of a sentence.

    Raises:
        DataError: there are more than MOST_CATEGORIES.
    """
    found = sorted(column.unique())
    if len(found) > MOST_CATEGORIES:
        raise DataError(
            f"{path}: column '{column.name}' holds {len(found)} different values, expected at most {MOST_CATEGORIES}; "
            f"{remedy}"
        )
    values = _parsed(found)
    return tuple(found if np.isnan(values).any() else (found[place] for place in np.argsort(values, kind="stable")))


def _parsed(cells: Sequence[str]) -> NDArray[np.float64]:
    """Each of `cells` as a number, NaN where it is none."""
    return np.asarray(pd.to_numeric(np.asarray(cells, object), errors="coerce"), np.float64)


def encode(
    path: Path, train: pd.DataFrame, test: pd.DataFrame, categorical: Collection[str] = ()
) -> tuple[Tensor, Tensor, tuple[Column, ...]]:
    """Features in [0, 1], `example feature`, of `train` and of `test`, and the columns that they came from.

    Numbers are scaled so that the smallest of `train` is 0 and the largest 1; those of `test` are clipped to that.
    A column that holds one number only becomes 0. Each category of either part becomes a feature that is 0 or 1.

    Args:
        categorical: columns of numbers to treat as categories; columns without any number are categories anyway.

    Raises:
        DataError: a column mixes numbers and others, writes numbers with a comma, or has too many categories.
    """
    parts: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]] = ([], [])
    columns: list[Column] = []
    start = 0
    for name in train:
        both = pd.concat([train[name], test[name]])
        if name in categorical or np.isnan(_parsed(both.unique())).all():
            if name not in categorical and all(_DECIMAL_COMMA.fullmatch(cell) for cell in both.unique()):
                raise DataError(
                    f"{path}: column '{name}' holds numbers with a decimal comma, such as '{both.iloc[0]}'; "
                    "write them with a point, or name the column in categorical"
                )
            both = with_equal_numbers_alike(both)
            known = categories(path, both)
            column = Column(name=name, start=start, categories=known)
            codes = pd.Categorical(both, categories=known).codes
            features = np.eye(len(known), dtype=np.float32)[codes]
        else:
            values = numbers(path, both)
            low, high = float(values[: len(train)].min()), float(values[: len(train)].max())
            column = Column(name=name, start=start, low=low, high=high)
            scaled = (values - low) / (high - low if high > low else 1.0)
            features = np.clip(scaled, 0, 1 if high > low else 0)[:, None].astype(np.float32)
        columns.append(column)
        start = column.features.stop
        parts[0].append(features[: len(train)])
        parts[1].append(features[len(train) :])
    first, second = (torch.from_numpy(np.concatenate(part, axis=1)) for part in parts)
    return first, second, tuple(columns)


def plain_columns(features: int) -> tuple[Column, ...]:
    """Columns x0, x1, ... of features that are the numbers themselves, in no range."""
    return tuple(Column(name=f"x{place}", start=place) for place in range(features))


def held_out(table: pd.DataFrame, fraction: float) -> NDArray[np.bool_]:
    """Which rows of `table` to test on: at least one, and not all.

    Those whose hash is smallest, so that neither order nor chance decides, and equal rows, except one such group,
    end up on the same side.
    """
    joined = ("\x1f".join(row) for row in table.itertuples(index=False, name=None))
    digests = [hashlib.blake2b(row.encode(), digest_size=8).digest() for row in joined]
    order = np.argsort(np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64), kind="stable")
    chosen = np.zeros(len(table), np.bool_)
    chosen[order[: min(math.ceil(len(table) * fraction), len(table) - 1)]] = True
    return chosen


def at_most(examples: Examples, limit: int | None, name: str) -> Examples:
    """`limit` of `examples` in their order, or all if there are fewer; a smaller choice is part of a larger one.

    Args:
        name: of the data set, the key of the choice.
    """
    if limit is None or limit >= len(examples):
        return examples
    chosen = torch.from_numpy(np.sort(numpy_generator(name, "max_examples").permutation(len(examples))[:limit]))
    groups = None if examples.groups is None else examples.groups[chosen]
    return Examples(raw=examples.raw[chosen], labels=examples.labels[chosen], scale=examples.scale, groups=groups)
