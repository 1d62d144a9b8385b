"""Dummy rows of a table whose categories are probabilities, and whose numbers stay between their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adversaries.scene import Units


@dataclass(frozen=True)
class RelaxedUnits(Units):
    """Units in which whatever dummy data become rows of a table (TabLeak, softmax and sigmoid).

    In [0, 1], the range of the inputs, the features of a categorical column are the softmax of the values that they
    would have without it, and a number is the sigmoid of its dummy value.

    Attributes:
        columns: how many features each column has, in their order: 1 is a number, more are categories.
    """

    columns: tuple[int, ...] = ()

    @classmethod
    def relaxing(cls, units: Units, columns: Sequence[int]) -> RelaxedUnits:
        """`units`, relaxed, with a value for each feature."""
        centre, scale, low, high = (
            part.expand(sum(columns)) for part in (units.centre, units.scale, units.low, units.high)
        )
        return cls(centre, scale, low, high, tuple(columns))

    def to_model(self, dummy: Tensor) -> Tensor:
        """What the model is fed with.

        Args:
            dummy: `example feature`.
        """
        width = self.high - self.low
        logits = (super().to_model(dummy) - self.low) / width
        take, absent, back, numbers = self._places
        padded = logits.index_select(1, take).reshape(-1, *absent.shape).masked_fill(absent, -torch.inf)
        shares = padded.softmax(2).flatten(1).index_select(1, back)
        return self.low + width * torch.where(numbers, dummy.sigmoid(), shares)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How columns are laid out side by side, each filled up to the widest.

        Returns:
            `column x widest`, the feature at each place; `column widest`, which places are filling; `feature`, its
            place; `feature`, whether it is a number.
        """
        widest, starts = max(self.columns), [sum(self.columns[:place]) for place in range(len(self.columns))]
        cells = [(place, at) for place in range(len(self.columns)) for at in range(widest)]
        inside = [at < self.columns[place] for place, at in cells]
        take = [starts[place] + min(at, self.columns[place] - 1) for place, at in cells]
        numbers = [size == 1 for size in self.columns for _ in range(size)]

        def made(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=self.low.device)

        absent = ~made(inside).reshape(len(self.columns), widest)
        return made(take), absent, made([at for at, there in enumerate(inside) if there]), made(numbers)
