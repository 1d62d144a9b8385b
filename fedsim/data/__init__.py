"""Data sets: examples and their description, and the interface of a plug-in. One file a family.

Nothing is downloaded unless the user asks for it: files are expected in the folder given by
`--data-dir` or `FEDSIM_DATA`, and the error for a missing one says how to get it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.task import Task

_LEAST_SPREAD = 1e-6
"""Standard deviation that is no rounding, as a share of the range."""
_OTHER_UNIT = 0.1
"""Share of the whole range below which what a channel spans is in another unit."""
_ROWS_AT_ONCE = 10_000
"""Examples that are converted at once, so that large files stay mapped and need no memory."""
PADDING = "<pad>"
"""Name of the token that fills up short texts."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Raw inputs and labels.

    Attributes:
        raw: `example ...` with the axes of the modality: `channel height width` of images,
            `feature` of rows of a table, `channel time` of series, or tokens, as stored.
        labels: `example`, class indices (int64), or for a regression standardised targets (float32), of
            several numbers `example number`; of several labels `example label`, each 0 or 1 (float32); masks
            `example height width`, class indices (int64).
        scale: factor that turns raw values into inputs; None for tokens, which stay integers.
        groups: `example`, the natural group of each (a writer, a role, an airline), as indices into
            `Dataset.group_names`; None where it is unknown.
    """

    raw: Tensor
    labels: Tensor
    scale: float | None
    groups: Tensor | None = None

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return inputs, `example ...`: float32 in the data set's value range, or int64 tokens."""
        if self.scale is None:
            return self.raw[index].to(torch.int64)
        return (self.raw[index] * self.scale).to(torch.float32)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table and the features that it became.

    Attributes:
        name: as in the file.
        start: index of its first feature.
        categories: its possible values, one feature (0 or 1) each; empty for a number.
        low: smallest number in the training file, which became 0.
        high: largest number in the training file, which became 1.
    """

    name: str
    start: int
    categories: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> int:
        """Number of features that it became."""
        return max(1, len(self.categories))

    @property
    def features(self) -> slice:
        """Indices of its features."""
        return slice(self.start, self.start + self.width)

    def values(self, inputs: Tensor) -> Tensor:
        """Return the column, `example`: indices into `categories`, or the file's numbers."""
        features = inputs[:, self.features]
        return features.argmax(1) if self.categories else self.low + features[:, 0] * (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A learning task with its data.

    Attributes:
        name: registered name.
        train: examples that clients may hold.
        test: examples that no client holds; public in the sense of the threat model.
        num_classes: number of classes, of which an example has one; 0 where it has none.
        source: where it comes from.
        licence: its terms of use, as its distributors state them.
        vocabulary: number of different tokens of a text; 0 otherwise.
        value_range: lowest and highest value of an input; unused for tokens. `input_bounds` has the
            range of each column.
        class_names: names of the classes, also of pixels, or of the labels or numbers; empty where numbers are enough.
        group_names: names of the natural groups (`Examples.groups`).
        columns: columns of a table.
        tokens: the words or characters that the tokens of a text stand for.
        target: mean and standard deviation by which the targets of a regression to one number were
            standardised.
        modality: registered name of the kind of the examples, as `image`, `table`, `text` or
            `series`; inferred where it is left out.
        num_labels: number of labels, of which an example may have any (multi-label); 0 where it has none.
        num_targets: how many numbers a regression predicts.
        mask_classes: number of classes of pixels, of which a mask names one for each; 0 where there are no masks.
        remarks: what was not read as the files hold it, one sentence each, of which every reading warns.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    source: str
    licence: str
    vocabulary: int = 0
    value_range: tuple[float, float] = (0.0, 1.0)
    class_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    tokens: tuple[str, ...] = ()
    target: tuple[float, float] = (0.0, 1.0)
    modality: str = ""
    num_labels: int = 0
    num_targets: int = 1
    mask_classes: int = 0
    remarks: tuple[str, ...] = ()

    @cached_property
    def task(self) -> Task:
        """Shapes of the inputs and outputs of a model for this data set."""
        shape = tuple(self.train.raw.shape[1:])
        numbers = self.num_labels, self.num_targets, self.mask_classes
        return Task(shape, self.num_classes, self.vocabulary, self.padding, self.modality, *numbers)

    @property
    def padding(self) -> int | None:
        """Token that fills up short texts, `<pad>`; None where there is none."""
        return self.tokens.index(PADDING) if PADDING in self.tokens else None

    @cached_property
    def input_bounds(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value of an input: two numbers, for a table `feature` each, or for series `channel 1`.

        A table whose value range is [0, 1] was scaled column by column, so that each column has
        that range. Channels of series have ranges of their own where one of them spans less than a
        tenth of the whole: these are in different units.
        """
        low, high = (torch.tensor(float(bound)) for bound in self.value_range)
        if self.task.modality == "series" and self.task.input_shape[0] > 1:
            lows, highs = self._measure_ends([0, 2])
            has_units = bool((highs - lows).amin() < _OTHER_UNIT * (high - low))
            return (lows[:, None], highs[:, None]) if has_units else (low, high)
        if self.task.modality != "table" or self.value_range == (0, 1):
            return low, high
        low, high = self._measure_ends([0])
        for column in self.columns:
            if column.categories:
                low[column.features], high[column.features] = 0.0, 1.0
        return low, high

    def _measure_ends(self, axes: list[int]) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest inputs over some axes; 1 apart where all are equal."""
        lows, highs = [], []
        for examples in (self.train, self.test):
            for start in range(0, len(examples), _ROWS_AT_ONCE):
                inputs = examples.inputs(slice(start, start + _ROWS_AT_ONCE))
                lows.append(inputs.amin(axes))
                highs.append(inputs.amax(axes))
        low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
        return low, torch.where(high > low, high, low + 1)

    def to_unit_range(self, inputs: Tensor) -> Tensor:
        """Scale inputs from `input_bounds` to [0, 1], the units of findings, except tokens."""
        low, high = self.input_bounds
        return inputs if self.vocabulary else (inputs - low) / (high - low)

    def from_unit_range(self, claimed: Tensor) -> Tensor:
        """Scale findings from [0, 1] to the units of inputs, the inverse of `to_unit_range`."""
        low, high = self.input_bounds
        return claimed if self.vocabulary else low + claimed * (high - low)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the training inputs, a channel or feature.

        Computed from about 20 000 examples at equal distances if there are more, because files may
        be sorted. What never differs in them counts as spread over its whole range, so that other
        values, of test examples, stay of the size of the rest.
        """
        stride = max(1, len(self.train) // 20_000)
        sample = self.train.inputs(torch.arange(0, len(self.train), stride)).to(torch.float64)
        axes = [0, *range(2, sample.ndim)]
        low, high = self.input_bounds
        spread, span = sample.std(axes).float(), (high - low).flatten()
        return sample.mean(axes).float(), torch.where(spread > _LEAST_SPREAD * span, spread, span)

    @cached_property
    def standardisation(self) -> tuple[Tensor, Tensor]:
        """Shift and scale that standardise inputs: the moments, but 0 and 1 for categories.

        A rare category would otherwise become a very large number.
        """
        shift, scale = (moment.clone() for moment in self.moments)
        for column in self.columns:
            if column.categories:
                shift[column.features], scale[column.features] = 0.0, 1.0
        return shift, scale

    def column(self, name: str) -> Column:
        """Return the column of this name.

        Raises:
            DataError: there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        names = ", ".join(column.name for column in self.columns) or "none, it is not a table"
        raise DataError(f"data: '{self.name}' has no column '{name}'; columns: {names}")


class DatasetPlugin(Protocol):
    """Interface of a data set plug-in: a frozen dataclass whose fields are its settings."""

    def load(self, folder: Path | None) -> Dataset:
        """Read the data from the data folder, which is None where the user gave none."""
        ...
