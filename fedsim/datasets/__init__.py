"""Data sets: examples, what is known of them, and the interface of a plug-in. One file a family.

Nothing is downloaded behind the user's back: files are looked for in the folder given by
`--data-dir` or `FEDSIM_DATA`, and a missing one is named together with the way to get it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedsim.errors import DataError
from fedsim.task import Task

PADDING = "<pad>"
"""What the token that fills short texts up is called."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Raw inputs and labels.

    Attributes:
        raw: `example channel height width` images, `example feature` rows of a table or
            `example place` tokens, as stored.
        labels: `example`, class indices (int64), or for a regression standardised targets (float32).
        scale: what raw values are multiplied with; None for tokens, which stay integers.
        groups: `example`, the natural group of each (a writer, a role, an airline), as indices into
            `Dataset.group_names`; None where it is unknown.
    """

    raw: Tensor
    labels: Tensor
    scale: float | None
    groups: Tensor | None = None

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """`example ...`, float32 in the data set's value range, or int64 tokens."""
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
        start: its first feature.
        categories: what it may hold, one feature (0 or 1) each; empty for a number.
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
        """How many features it became."""
        return max(1, len(self.categories))

    @property
    def features(self) -> slice:
        """Its features."""
        return slice(self.start, self.start + self.width)

    def values(self, inputs: Tensor) -> Tensor:
        """`example`: indices into `categories`, or the numbers of the file."""
        own = inputs[:, self.features]
        return own.argmax(1) if self.categories else self.low + own[:, 0] * (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A learning task with its data.

    Attributes:
        name: registered name.
        train: examples that clients may hold.
        test: examples that no client holds; public in the sense of the threat model.
        num_classes: number of classes; 0 for a regression.
        source: where it comes from.
        licence: what its distributors say of its use.
        vocabulary: number of different tokens of a text; 0 otherwise.
        value_range: lowest and highest value of an input; means nothing for tokens. See `ends` for each column's own.
        class_names: what the classes are called; empty where numbers say it all.
        group_names: what the natural groups are called (`Examples.groups`).
        columns: of a table.
        tokens: what the tokens of a text stand for.
        target: mean and standard deviation that the targets of a regression were standardised with.
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

    @cached_property
    def task(self) -> Task:
        """What a model has to do."""
        return Task(tuple(self.train.raw.shape[1:]), self.num_classes, self.vocabulary, self.padding)

    @property
    def padding(self) -> int | None:
        """The token that fills short texts up, which data sets call `<pad>`; None where there is none."""
        return self.tokens.index(PADDING) if PADDING in self.tokens else None

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value of an input: of images numbers, of a table `feature`, as each column has its own.

        Where a table is said to lie in [0, 1], its columns were brought there, and that is the range of each.
        """
        low, high = (torch.tensor(float(end)) for end in self.value_range)
        if self.vocabulary or self.train.raw.ndim != 2 or self.value_range == (0, 1):
            return low, high
        rows = torch.cat([self.train.inputs(), self.test.inputs()])
        low, high = rows.amin(0), rows.amax(0)
        for column in self.columns:
            if column.categories:
                low[column.features], high[column.features] = 0.0, 1.0
        return low, torch.where(high > low, high, low + 1)

    def in_unit_range(self, inputs: Tensor) -> Tensor:
        """`inputs` as findings claim them: what lies between `ends` becomes [0, 1]; tokens stay as they are."""
        low, high = self.ends
        return inputs if self.vocabulary else (inputs - low) / (high - low)

    def from_unit_range(self, claimed: Tensor) -> Tensor:
        """The inputs that `in_unit_range` makes `claimed` of."""
        low, high = self.ends
        return claimed if self.vocabulary else low + claimed * (high - low)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation a channel (of a table: a feature), of the training inputs.

        Computed from about 20 000 examples at equal distances if there are more, because files may be sorted.
        """
        every = max(1, len(self.train) // 20_000)
        sample = self.train.inputs(torch.arange(0, len(self.train), every)).to(torch.float64)
        axes = [0, *range(2, sample.ndim)]
        return sample.mean(axes).float(), sample.std(axes).clamp_min(1e-3).float()

    @cached_property
    def standard(self) -> tuple[Tensor, Tensor]:
        """What standardised inputs are shifted and divided by: the moments, but 0 and 1 for categories.

        A category that is rare would otherwise become a very large number.
        """
        shift, scale = (moment.clone() for moment in self.moments)
        for column in self.columns:
            if column.categories:
                shift[column.features], scale[column.features] = 0.0, 1.0
        return shift, scale

    def column(self, name: str) -> Column:
        """The column of a table called `name`.

        Raises:
            DataError: there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        known = ", ".join(column.name for column in self.columns) or "none, it is no table"
        raise DataError(f"data: '{self.name}' has no column '{name}'; columns: {known}")


class DatasetPlugin(Protocol):
    """What a registered data set offers."""

    def load(self, folder: Path | None) -> Dataset:
        """Read the data; `folder` is the data folder, None where the user gave none."""
        ...
