"""Relaxed rows of a table: categories are probabilities, numbers stay between their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.inversion.input_scaling import InputScaling


@dataclass(frozen=True)
class RelaxedScaling(InputScaling):
    """Map that turns any dummy data into rows of a table (TabLeak, softmax and sigmoid).

    In [0, 1], the range of the inputs, the features of a categorical column are the softmax of the
    values that `InputScaling` would give, and a number is the sigmoid of its dummy value.

    Attributes:
        columns: number of features of each column, in their order: 1 is a number, more are
            categories.
    """

    columns: tuple[int, ...] = ()

    @classmethod
    def from_scaling(cls, units: InputScaling, columns: Sequence[int]) -> RelaxedScaling:
        """Relax `scaling`, with a value for each feature."""
        tensors = (units.centre, units.scale, units.low, units.high)
        centre, scale, low, high = (tensor.expand(sum(columns)) for tensor in tensors)
        return cls(centre, scale, low, high, tuple(columns))

    def to_model(self, dummy: Tensor) -> Tensor:
        """Return the model's inputs for dummy data.

        Args:
            dummy: `example feature`.
        """
        width = self.high - self.low
        logits = (super().to_model(dummy) - self.low) / width
        cell_features, padding, feature_cells, is_number = self._layout
        cells = logits.index_select(1, cell_features).reshape(-1, *padding.shape)
        probabilities = cells.masked_fill(padding, -torch.inf).softmax(2)
        probabilities = probabilities.flatten(1).index_select(1, feature_cells)
        return self.low + width * torch.where(is_number, dummy.sigmoid(), probabilities)

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lay out the columns as rows of cells, each padded to the widest.

        Returns:
            `cell`, the feature of each of columns x widest cells; `column widest`, which cells are
            padding; `feature`, its cell; `feature`, whether it is a number.
        """
        widest = max(self.columns)
        cell_features: list[int] = []
        padding: list[bool] = []
        is_number: list[bool] = []
        start = 0
        for size in self.columns:
            for offset in range(widest):
                cell_features.append(start + min(offset, size - 1))
                padding.append(offset >= size)
            is_number += [size == 1] * size
            start += size
        feature_cells = [cell for cell, padded in enumerate(padding) if not padded]
        device = self.low.device
        return (
            torch.tensor(cell_features, device=device),
            torch.tensor(padding, device=device).reshape(len(self.columns), widest),
            torch.tensor(feature_cells, device=device),
            torch.tensor(is_number, device=device),
        )
