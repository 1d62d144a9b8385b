"""Map the standardised dummy data to the inputs of the model, and to [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.interfaces.attack import Knowledge


@dataclass(frozen=True)
class InputScaling:
    """Affine map from the standardised dummy data to the model's inputs and to [0, 1].

    Attributes:
        centre: of the model's inputs, where the dummy data are 0.
        scale: of the model's inputs for one unit of the dummy data.
        low: smallest value of an input, in the model's range.
        high: largest value of an input.
    """

    centre: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def from_knowledge(cls, knowledge: Knowledge, like: Tensor) -> InputScaling:
        """Standardise by the granted moments, else by the middle and a quarter of the range.

        Args:
            like: gives the type and the device.
        """
        assert knowledge.value_range is not None
        assert knowledge.input_shape is not None
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end).to(like).reshape(axes) for end in knowledge.value_range)
        if knowledge.input_mean is None or knowledge.input_std is None:
            return cls(centre=(low + high) / 2, scale=(high - low) / 4, low=low, high=high)
        mean = torch.as_tensor(knowledge.input_mean).to(like).reshape(axes)
        std = torch.as_tensor(knowledge.input_std).to(like).reshape(axes)
        return cls(centre=mean, scale=std, low=low, high=high)

    def to_model(self, dummy: Tensor) -> Tensor:
        """Return the model's inputs for dummy data, differentiable in them."""
        return self.centre + self.scale * dummy

    def to_unit_range(self, dummy: Tensor) -> Tensor:
        """Return the data of a finding for dummy data: float32 on the CPU, in [0, 1]."""
        values = (self.to_model(dummy) - self.low) / (self.high - self.low)
        return values.clamp(0, 1).float().cpu()

    def from_unit_range(self, data: Tensor) -> Tensor:
        """Return the dummy data for a finding's `data` in [0, 1]."""
        return (self.low + (self.high - self.low) * data - self.centre) / self.scale

    @torch.no_grad()
    def clamp_(self, dummy: Tensor) -> None:
        """Clamp dummy data in place to the valid range of inputs (SME, App. D)."""
        dummy.clamp_(*self._bounds)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return (self.low - self.centre) / self.scale, (self.high - self.centre) / self.scale
