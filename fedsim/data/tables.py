"""Tables: UCI Adult, flight prices, and any file of your own."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedsim.base.constraints import CheckedSettings, PositiveInt, PositiveShareBelowOne
from fedsim.base.errors import ConfigError, DataError, did_you_mean
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.files import find_file, find_named_file, require_data_folder, verify_checksum
from fedsim.data.tabular import (
    check_complete,
    choose_examples,
    choose_test_rows,
    encode_columns,
    list_categories,
    parse_numbers,
    read_table,
    unify_numbers,
)

log = logging.getLogger(__name__)

_ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
"""Columns in the order of the file; the last one, the income, follows them."""


@dataclass(frozen=True, kw_only=True)
class Adult(CheckedSettings):
    """UCI Adult: which of 45 222 people of the 1994 US census earn more than 50 000 dollars a year.

    The two original files: 30 162 training and 15 060 test examples with 102 features in [0, 1]:
    four numbers, scaled by the training file (test values beyond it are clipped), and eight
    attributes as one feature a category.

    LMRA [Driouich2022] reports 12 300 records with 53 features and does not say which. With `drop =
    ["fnlwgt", "native-country"]` there are the 62 features of its released code.

    Args:
        missing: how to treat people with an unknown (`?`) workclass, occupation or country. `drop`
            leaves them out, as the file's authors do in their comparison (adult.names), so that no
            attack is scored on guessing that something is unknown; `category` keeps all 48 842, `?`
            being a category.
        drop: columns to leave out. By default the census's sampling weight, which is not an attribute
            of a person, and `education-num`, which repeats `education`: with it, education could be
            read from another column.
        max_examples: keep at most so many training examples, chosen at random; None keeps all.

    References:
        [Kohavi1996].
    """

    paper: ClassVar[Paper] = cite("Kohavi1996")

    missing: Literal["drop", "category"] = "drop"
    drop: tuple[str, ...] = ("fnlwgt", "education-num")
    max_examples: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.drop:
            if name not in _ADULT_COLUMNS:
                raise ConfigError(f"drop: Adult has no column '{name}', {did_you_mean(name, _ADULT_COLUMNS)}")
        if set(self.drop) == set(_ADULT_COLUMNS):
            raise ConfigError("drop: expected at least one column to be left, got all of them")

    def load(self, folder: Path | None) -> Dataset:
        """Read `adult/adult.data` and `adult/adult.test`."""
        home = require_data_folder(folder, "adult")
        remedy = f"get https://archive.ics.uci.edu/dataset/2/adult and unpack it into {home / 'adult'}"
        files = [find_file(home, [f"adult/{name}"], remedy) for name in ("adult.data", "adult.test")]
        sums = ("5d7c39d7b8804f071cdd1f2a7c460872", "35238206dfdf7f1fe215bbb874adecdc")

        def parse() -> Dataset:
            return self._parse([verify_checksum(path, home, md5) for path, md5 in zip(files, sums, strict=True)])

        return load_cached(self, files, parse)

    def _parse(self, files: Sequence[Path]) -> Dataset:
        tables, labels = [], []
        for path in files:
            table = read_table(path, names=[*_ADULT_COLUMNS, "income"], comment="|")
            income = table.pop("income").str.removesuffix(".")  # lines of the test file end so
            if unknown := sorted(set(income) - {"<=50K", ">50K"}):
                raise DataError(f"{path}: income '{unknown[0]}' is neither <=50K nor >50K; get the file again")
            table = check_complete(path, table.drop(columns=list(self.drop)), ("?",))
            selected = ~table.isin(["?"]).any(axis=1) if self.missing == "drop" else income.notna()
            tables.append(table[selected])
            labels.append(torch.from_numpy((income[selected] == ">50K").to_numpy(np.int64)))
        train, test, columns = encode_columns(files[0], *tables)
        return Dataset(
            name="adult",
            modality="table",
            train=choose_examples(Examples(raw=train, labels=labels[0], scale=1.0), self.max_examples, "adult"),
            test=Examples(raw=test, labels=labels[1], scale=1.0),
            num_classes=2,
            source="B. Becker, R. Kohavi: Adult, UCI Machine Learning Repository (1996)",
            licence="CC BY 4.0 (UCI)",
            class_names=("<=50K", ">50K"),
            columns=columns,
        )


@dataclass(frozen=True, kw_only=True)
class FlightPrices(CheckedSettings):
    """Prices of 300 153 flights between six Indian cities in 2022: a regression, by airline.

    A public stand-in for the Flight Prices of LMRA [Driouich2022], whose European bookings are
    private: they have 10 airlines and 9 features, this has 6 airlines, which are the natural
    groups, and 31 features in [0, 1]: the six attributes departure_time, source_city, stops,
    arrival_time, destination_city and class as one feature a category, and the numbers duration
    (hours) and days_left. The airline is the owner of an example, not a feature; the flight number,
    of 1561 kinds, is left out. A fifth of the rows, chosen by a hash of their content, are test
    examples.

    Targets are prices in rupees, standardised by the training examples (`Dataset.target`).

    Args:
        max_examples: keep at most so many training examples, chosen at random; None keeps all. LMRA
            has 100 000 records.
    """

    max_examples: PositiveInt | None = None

    def load(self, folder: Path | None) -> Dataset:
        """Read `flight-prices/Clean_Dataset.csv`, plain or gzipped."""
        home = require_data_folder(folder, "flight-prices")
        remedy = f"get the Kaggle data set 'Flight Price Prediction' and put the file into {home / 'flight-prices'}"
        path = find_file(home, [f"flight-prices/Clean_Dataset.csv{end}" for end in (".gz", "")], remedy)

        def parse() -> Dataset:
            table = read_table(verify_checksum(path, home))
            _require_columns(path, table, [*_FLIGHT_COLUMNS, "airline", "price"])
            # Kaggle's own copy numbers its rows in a nameless column.
            table = table[[*_FLIGHT_COLUMNS, "airline", "price"]]
            fields = _split_table(path, table, "price", "airline", fraction=0.2)
            train = choose_examples(fields.pop("train"), self.max_examples, "flight-prices")
            source = "Flight Price Prediction (fares collected from EaseMyTrip, 2022), Kaggle"
            return Dataset(
                name="flight-prices",
                modality="table",
                train=train,
                source=source,
                licence="see its page on Kaggle",
                **fields,
            )

        return load_cached(self, [path], parse)


_FLIGHT_COLUMNS = (
    *("source_city", "departure_time", "stops", "arrival_time", "destination_city", "class"),
    *("duration", "days_left"),
)


@dataclass(frozen=True, kw_only=True)
class Csv(CheckedSettings):
    """A table of your own: text with a header line, plain or gzipped.

    Columns without any number become one feature a category. Other columns become one feature, which
    the training examples scale to [0, 1]; test values beyond those are clipped. Equal rows stay on
    one side of the split.

    Args:
        path: the file, absolute or within the data folder.
        target: the column to predict.
        task: `classification`, each value of the target being a class; or `regression` of a number,
            which is standardised.
        group: the column with the owner of each example, for the partition `natural`; it is no
            feature.
        categorical: columns of numbers that are categories.
        drop: columns to leave out.
        separator: the character between two cells.
        test_fraction: share of the rows to test on, chosen by a hash of their content.
    """

    path: str = ""
    target: str = ""
    task: Literal["classification", "regression"] = "classification"
    group: str | None = None
    categorical: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    separator: str = ","
    test_fraction: PositiveShareBelowOne = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.separator) != 1 or self.separator in '"\r\n':
            raise ConfigError(f"separator: expected one character and no quote or line end, got {self.separator!r}")
        if self.group is not None and self.group == self.target:
            raise ConfigError(f"group: expected another column than the target, got '{self.group}'")
        for name in (self.target, self.group):
            if name is not None and name in self.drop:
                raise ConfigError(f"drop: expected columns that are not in use, got '{name}', the target or the group")

    def load(self, folder: Path | None) -> Dataset:
        """Read the file `path`."""
        if not self.path or not self.target:
            raise DataError(f"data: 'csv' needs {'a target' if self.path else 'a path'}; set data.path and data.target")
        home, path = find_named_file(self.path, folder, "csv")

        def parse() -> Dataset:
            table = read_table(verify_checksum(path, home), self.separator)
            names = [self.target, *self.drop, *self.categorical, *([self.group] if self.group else [])]
            _require_columns(path, table, names)
            fields = _split_table(
                path,
                table.drop(columns=list(self.drop)),
                self.target,
                self.group,
                task=self.task,
                categorical=self.categorical,
                fraction=self.test_fraction,
            )
            return Dataset(name="csv", modality="table", source=path.name, licence="as its owner says", **fields)

        dataset = load_cached(self, [path], parse)
        _warn_of_identifiers(path, dataset)
        _warn_of_spellings(path, dataset, self.target, self.group)
        return dataset


def _warn_of_identifiers(path: Path, dataset: Dataset) -> None:
    """Warn of texts that differ from row to row: each would be a feature, which tells one row from all others."""
    rows = len(dataset.train.labels) + len(dataset.test.labels)
    for column in dataset.columns:
        if len(column.categories) > max(rows / 2, 10):
            log.warning(
                "%s: column '%s' has %d different texts in %d rows, each of which becomes a feature; "
                "if it holds names or ids, name it in drop, or in group if it says whose a row is",
                path,
                column.name,
                len(column.categories),
                rows,
            )


def _warn_of_spellings(path: Path, dataset: Dataset, target: str, group: str | None) -> None:
    """Warn of texts of a column that differ in case, blanks or Unicode form alone, each of which counts by itself."""
    texts = {column.name: column.categories for column in dataset.columns}
    for name, categories in (texts | {target: dataset.class_names, group or "": dataset.group_names}).items():
        first_spelling: dict[str, str] = {}
        for text in categories:
            plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
            if (first := first_spelling.setdefault(plain, text)) != text:
                log.warning(
                    "%s: column '%s' has both '%s' and '%s', which count as two; write them in the same way if they "
                    "are one",
                    path,
                    name,
                    first,
                    text,
                )
                break


def _require_columns(path: Path, table: pd.DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in table:
            raise DataError(f"{path}: has no column '{name}', {did_you_mean(name, table.columns)}")


def _split_table(
    path: Path,
    table: pd.DataFrame,
    target: str,
    group: str | None,
    *,
    fraction: float,
    task: str = "regression",
    categorical: Collection[str] = (),
) -> dict[str, Any]:
    """Split a table into training and test examples, and return the fields of a `Dataset`."""
    check_complete(path, table)
    if len(table) < 2:
        raise DataError(f"{path}: holds {len(table)} rows, expected at least 2, one to train and one to test on")
    is_test = choose_test_rows(table, fraction)
    labels, fields = _make_labels(path, table[target], task, ~is_test)
    groups: Tensor | None = None
    if group is not None:
        table[group] = unify_numbers(table[group])
        fields["group_names"] = tuple(sorted(set(table[group])))
        groups = _category_indices(table[group], fields["group_names"])
    features = table.drop(columns=[target, *([group] if group is not None else [])])
    if not len(features.columns):
        raise DataError(f"{path}: has no column besides the target and the group, expected at least one feature")
    train, test, fields["columns"] = encode_columns(path, features[~is_test], features[is_test], categorical)
    for name, raw, mask in (("train", train, ~is_test), ("test", test, is_test)):
        rows = torch.from_numpy(mask)
        part_groups = None if groups is None else groups[rows]
        fields[name] = Examples(raw=raw, labels=labels[rows], scale=1.0, groups=part_groups)
    return fields


def _make_labels(path: Path, column: pd.Series, task: str, is_train: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return labels or standardised targets, and the fields of `Dataset` that describe them."""
    if task == "classification":
        column = unify_numbers(column)
        names = list_categories(path, column, "set task to regression, or choose another target")
        if len(names) < 2:
            raise DataError(f"{path}: the target '{column.name}' is '{names[0]}' in every line, expected two classes")
        if len(names) > len(column) / 2 and len(column) > 10:
            raise DataError(
                f"{path}: the target '{column.name}' has {len(names)} values in {len(column)} lines, too many to be "
                "classes; set task to regression, or choose another target"
            )
        return _category_indices(column, names), {"num_classes": len(names), "class_names": names}
    values = parse_numbers(path, column)
    mean, std = float(values[is_train].mean()), float(values[is_train].std())
    if not std > 0:
        raise DataError(
            f"{path}: the target '{column.name}' is {mean} in every line to train on, expected a number to predict"
        )
    standardised = torch.from_numpy(((values - mean) / std).astype(np.float32))
    return standardised, {"num_classes": 0, "target": (mean, std)}


def _category_indices(column: pd.Series, names: Sequence[str]) -> Tensor:
    return torch.from_numpy(pd.Categorical(column, categories=names).codes.astype(np.int64))
