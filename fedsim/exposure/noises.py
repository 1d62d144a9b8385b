"""What measures share that perturb the inputs by noise and look at what the client would send then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.measure import Measure
from fedsim.randomness import generator
from fedsim.training.sent import Sent

_ROUNDING = 16
"""Rounding errors of one number that what is sent may be off by, beside its length, when it is computed another way."""


@dataclass(frozen=True, kw_only=True)
class OfNoises(Measure):
    """Base of measures that add Gaussian noise to all inputs that vary, a batch being one vector.

    The noises are the same each time, and do not depend on the memory budget. In float32 a value is good to a
    thousandth, but to a few percent where the batch is learnt by heart: at a loss near 0 its gradient is a small
    difference of large numbers. A model and inputs in float64 give it without that.

    Args:
        sigma: standard deviation of each number of a noise, above 0, in model units: those of the inputs as the
            network gets them, after normalisation.
        noises: how many, at least 1.

    Raises:
        ConfigError: a setting is out of range, or noise of this size is lost in the rounding of the inputs.
    """

    sigma: float = 0.001
    noises: int = 1000
    black_box: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ConfigError(f"sigma: expected a standard deviation above 0, got {self.sigma}")
        if self.noises < 1:
            raise ConfigError(f"noises: expected at least 1, got {self.noises}")

    def _of(self, sent: Sent) -> Mapping[str, float | Tensor]:
        sent.check_continuous()
        resolution = torch.finfo(sent.inputs.dtype).eps * float(sent.unknown.abs().max())
        if self.sigma < 100 * resolution:
            raise ConfigError(
                f"sigma: noise of {self.sigma} is lost in the rounding of {sent.inputs.dtype} inputs, expected at "
                f"least {100 * resolution:.0e}; choose a larger sigma"
            )
        drawn = (noise.to(sent.inputs.dtype) for noise in self._drawn(sent.unknown.shape))
        return self._of_changes(torch.cat([self._change(sent, *block).double() for block in sent.around(drawn)]))

    def _drawn(self, shape: torch.Size) -> Iterator[Tensor]:
        random = generator("measure", "noises")
        for _ in range(self.noises):
            yield self.sigma * torch.randn(shape, generator=random, dtype=torch.float64)

    @abstractmethod
    def _change(self, sent: Sent, noises: Tensor, moved: Tensor) -> Tensor:
        """How much each of `noise example ...` changes what is sent, which is `moved`, `noise number`, then."""

    @abstractmethod
    def _of_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        """The values, of one change for each noise, in float64."""


def felt(changes: Tensor, least: Tensor | float) -> Tensor:
    """`changes`, with 0 for those that are not above `least`, as rounding alone makes them."""
    return torch.where(changes <= least, 0, changes)


def rounding(sent: Sent) -> float:
    """By how much what is sent may differ though nothing changed, beside its length."""
    return _ROUNDING * torch.finfo(sent.vector.dtype).eps


def highest(changes: Tensor) -> dict[str, Tensor]:
    """The largest of all changes, and the quantile at 99 %, which of 101 or more noises one alone cannot set.

    Both are NaN where nothing changes.
    """
    largest = changes.max()
    if not largest:
        return dict.fromkeys(("max", "q99"), torch.tensor(torch.nan))
    return {"max": largest, "q99": changes.quantile(0.99)}
