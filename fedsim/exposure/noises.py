"""Base of the measures that add noise to the inputs and see how the client's message changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.exposure.hessian import ROUNDING_FACTOR
from fedsim.exposure.measure import Measure
from fedsim.training.message_function import ClientMessage


@dataclass(frozen=True, kw_only=True)
class NoiseMeasure(Measure):
    """Base of measures that add Gaussian noise to all inputs that vary, a batch being one vector.

    The noises are the same each time, and do not depend on the memory budget. In float32 a value is
    accurate to a thousandth, but only to a few percent where the model has memorised the batch: at
    a loss near 0 its gradient is a small difference of large numbers. A model and inputs in float64
    avoid that.

    Args:
        sigma: standard deviation of each number of a noise, above 0, in model units: those of the
            inputs as the network gets them, after normalisation.
        noises: how many, at least 1.

    Raises:
        ConfigError: a setting is out of range, noise of this size is lost in the rounding of the
            inputs, or the message with it is not finite.
    """

    sigma: PositiveFloat = 0.001
    noises: PositiveInt = 1000
    black_box: ClassVar[bool] = True

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        sent.check_continuous()
        resolution = torch.finfo(sent.inputs.dtype).eps * float(sent.unknown_inputs.abs().max())
        if self.sigma < 100 * resolution:
            raise ConfigError(
                f"sigma: noise of {self.sigma} is lost in the rounding of {sent.inputs.dtype} inputs, expected at "
                f"least {100 * resolution:.0e}; choose a larger sigma"
            )
        effects = sent.compute_once(self._compute_effects, self.sigma, self.noises)
        if not effects.message_change.isfinite().all():
            raise ConfigError(
                f"sigma: with noise of {self.sigma} the message is NaN or infinite, and without noise it is finite; "
                "choose a smaller sigma"
            )
        return self._summarise_changes(self._compare_messages(effects))

    @staticmethod
    def _compute_effects(message: ClientMessage, sigma: float, noises: int) -> NoiseEffects:
        random = generator("measure", "noises")
        shape = message.unknown_inputs.shape
        normals = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(noises))
        scaled = ((sigma * normal).to(message.inputs.dtype) for normal in normals)
        blocks = [
            NoiseEffects.compute(message, noise_block, noisy_messages)
            for noise_block, noisy_messages in message.perturbed_messages(scaled)
        ]
        return NoiseEffects.concatenate(blocks)

    @abstractmethod
    def _compare_messages(self, moves: NoiseEffects) -> Tensor:
        """Return how strongly each noise changes the message, `noise`."""

    @abstractmethod
    def _summarise_changes(self, changes: Tensor) -> Mapping[str, Tensor]:
        """Summarise the changes, one for each noise, as the measure's values in float64."""


@dataclass(frozen=True)
class NoiseEffects:
    """Effects of several noises on the inputs, as one vector, and on the message.

    All are `noise`, in float64.

    Attributes:
        noise_norm: norm of the noise.
        input_turn: 1 - cos between the inputs with the noise and without; NaN where they are zero.
        message_change: distance by which the message changes; 0 where that is rounding only.
        message_turn: 1 - cos between the message with the noise and without; 0 where that is rounding
            only.
    """

    noise_norm: Tensor
    input_turn: Tensor
    message_change: Tensor
    message_turn: Tensor

    @classmethod
    def compute(cls, message: ClientMessage, noises: Tensor, noisy_vectors: Tensor) -> Self:
        """Compare the messages with each noise to the one without.

        Args:
            message: the message as a function of its inputs.
            noises: `noise example ...`.
            noisy_vectors: `noise parameter`, the messages with these noises.
        """
        vector = message.vector
        inputs, flat_noises = message.unknown_inputs.double().flatten(), noises.double().flatten(1)
        rounding = ROUNDING_FACTOR * torch.finfo(vector.dtype).eps
        return cls(
            noise_norm=flat_noises.norm(dim=1),
            input_turn=cosine_distances(inputs + flat_noises, inputs),
            message_change=_drop_rounding(_norms(noisy_vectors - vector), rounding * _norms(vector)),
            message_turn=_drop_rounding(cosine_distances(noisy_vectors, vector), rounding**2 / 2),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the effects of several blocks of noises."""
        columns = []
        for field in fields(cls):
            columns.append(torch.cat([getattr(part, field.name) for part in parts]))
        return cls(*columns)


def cosine_distances(vectors: Tensor, reference: Tensor) -> Tensor:
    """Compute 1 - cos between each vector and a reference, accurate for small angles.

    One minus a cosine would be rounding only; half the squared chord between unit vectors is not.

    Args:
        vectors: `vector number`.
        reference: `number`.

    Returns:
        `vector`; NaN for a vector that is zero.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> cosine_distances(vectors, torch.tensor([3.0, 0.0])).round(decimals=3).tolist()
    [0.0, 1.0]
    """
    unit_reference = reference / _norms(reference).to(reference)
    unit_vectors = vectors / _norms(vectors)[:, None].to(vectors)
    chords: Tensor = unit_vectors.sub_(unit_reference).norm(dim=1)
    return chords.square() / 2


def _norms(vectors: Tensor) -> Tensor:
    """Return norms of `[vector] number` in float64: small squares underflow in float32."""
    norms: Tensor = vectors.norm(dim=-1, dtype=torch.float64)
    return norms


def _drop_rounding(changes: Tensor, rounding: Tensor | float) -> Tensor:
    """Return `changes` in float64, with 0 for those that are no larger than `rounding`."""
    return torch.where(changes <= rounding, 0, changes).double()


def maximum_and_q99(changes: Tensor) -> dict[str, Tensor]:
    """Return the largest change, `max`, and the quantile at 99 %, `q99`.

    With 101 or more noises a single one does not set the quantile. Both are NaN where nothing
    changes.
    """
    largest = changes.max()
    if not largest:
        return dict.fromkeys(("max", "q99"), torch.tensor(torch.nan))
    return {"max": largest, "q99": changes.quantile(0.99)}
