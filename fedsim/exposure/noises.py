"""What measures share that perturb the inputs by noise and look at what the client would send then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.exposure.hessian import ROUNDING
from fedsim.measure import Measure
from fedsim.randomness import generator
from fedsim.training.sent import Sent


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
        ConfigError: a setting is out of range, noise of this size is lost in the rounding of the inputs, or what is
            sent with it is not finite.
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
        moves = sent.once(self._moves, self.sigma, self.noises)
        if not moves.change.isfinite().all():
            raise ConfigError(
                f"sigma: with noise of {self.sigma} what is sent is NaN or infinite, as it is not without noise; "
                "choose a smaller sigma"
            )
        return self._of_changes(self._change(moves))

    @staticmethod
    def _moves(sent: Sent, sigma: float, noises: int) -> Moves:
        random = generator("measure", "noises")
        drawn = (torch.randn(sent.unknown.shape, generator=random, dtype=torch.float64) for _ in range(noises))
        scaled = ((sigma * noise).to(sent.inputs.dtype) for noise in drawn)
        return Moves.joined([Moves.of(sent, *block) for block in sent.around(scaled)])

    @abstractmethod
    def _change(self, moves: Moves) -> Tensor:
        """How much each noise changes what is sent, `noise`."""

    @abstractmethod
    def _of_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        """The values, of one change for each noise, in float64."""


@dataclass(frozen=True)
class Moves:
    """By how much several noises move and turn the inputs, as one vector, and what is sent; all `noise`, in float64.

    Attributes:
        noise: length of the noise.
        turn: 1 - cos of the inputs with the noise and without; NaN where they are zero.
        change: how far what is sent moves, and 0 where that is no more than rounding.
        turn_sent: 1 - cos of what is sent with the noise and without, and 0 where that is no more than rounding.
    """

    noise: Tensor
    turn: Tensor
    change: Tensor
    turn_sent: Tensor

    @classmethod
    def of(cls, sent: Sent, noises: Tensor, moved: Tensor) -> Self:
        """Of `noise example ...`, with which `moved`, `noise number`, is sent."""
        inputs, flat = sent.unknown.double().flatten(), noises.double().flatten(1)
        rounding = ROUNDING * torch.finfo(sent.vector.dtype).eps
        return cls(
            noise=flat.norm(dim=1),
            turn=one_minus_cosine(inputs + flat, inputs),
            change=_felt(_lengths(moved - sent.vector), rounding * _lengths(sent.vector)),
            turn_sent=_felt(one_minus_cosine(moved, sent.vector), rounding**2 / 2),
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One after the other."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def one_minus_cosine(some: Tensor, one: Tensor) -> Tensor:
    """1 - cos of each of `vector number` with `number`, accurate for small angles; NaN of a vector that is zero."""
    chords: Tensor = (some / _lengths(some)[:, None].to(some)).sub_(one / _lengths(one).to(one)).norm(dim=1)
    return chords.square() / 2


def _lengths(vectors: Tensor) -> Tensor:
    """Of `[vector] number`, in float64, for squares of small numbers do not fit into float32."""
    lengths: Tensor = vectors.norm(dim=-1, dtype=torch.float64)
    return lengths


def _felt(changes: Tensor, least: Tensor | float) -> Tensor:
    """`changes` in float64, with 0 for those that are not above `least`, as rounding alone makes them."""
    return torch.where(changes <= least, 0, changes).double()


def highest(changes: Tensor) -> dict[str, Tensor]:
    """The largest of all changes, and the quantile at 99 %, which of 101 or more noises one alone cannot set.

    Both are NaN where nothing changes.
    """
    largest = changes.max()
    if not largest:
        return dict.fromkeys(("max", "q99"), torch.tensor(torch.nan))
    return {"max": largest, "q99": changes.quantile(0.99)}
