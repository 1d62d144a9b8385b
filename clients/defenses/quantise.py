"""Quantisation: the update is sent in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State

_SMOOTHING_WIDTH = 0.3
"""Width of the smooth sign's transition, as a share of the tensor's mean absolute value."""

_LEVEL_TOLERANCE = 0.02
"""Largest distance from a whole multiple that counts as an error of floating-point numbers."""
_HALF_PRECISION = 2**-11
"""Largest relative error of half precision."""


@dataclass(frozen=True, kw_only=True)
class Quantise(Defense):
    """Send each tensor of the update as small integers times one scale, or in half precision.

    - `sign`: the sign of each number times the mean absolute value of its tensor.
    - `qsgd`: |x| / norm, where norm is the L2 norm of the tensor, rounded at random up or down to
      one of s = 2^(bits-1) - 1 levels above 0, so that it is unbiased.
    - `ternary`: the same with one level, the largest absolute value of the tensor.
    - `fp16`: half precision.

    Integers take one byte each up to 8 bits, two above. No formal guarantee: the rounding is not
    designed to hide anything.

    Args:
        scheme: one of these.
        bits: b of `qsgd`, including the sign, from 2 to 16.

    Raises:
        ConfigError: `bits` is out of range.

    References:
        [Alistarh2017] (QSGD), Sec. 3.1; [Bernstein2018] (signSGD); [Karimireddy2019] for the scale
        of signs; [Wen2017] (TernGrad).
        Differs: integers are not coded by their frequencies; it acts on the update of a round,
        which for FedSGD is the gradient.
    """

    scheme: Literal["sign", "qsgd", "ternary", "fp16"] = "qsgd"
    bits: Annotated[int, Ge(2), Le(16)] = 8

    against: ClassVar[str] = "a server that inverts the update and takes it for exact; with many bits it nearly is"
    cost: ClassVar[str] = "accuracy, where bits are few; saves two to four times the bytes, hardly any time"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = cite("Alistarh2017")

    def on_update(self, update: State, context: LocalContext) -> Payload:
        """Return the quantised update; a tensor of zeros stays zero."""
        if self.scheme == "fp16":
            return Payload.from_dense({name: tensor.half() for name, tensor in update.items()})
        if self.scheme == "sign":
            signs = {name: tensor.sign().to(torch.int8) for name, tensor in update.items()}
            return Payload.from_integers(signs, {name: _mean(tensor.abs()) for name, tensor in update.items()})
        levels = self._levels
        integers, scales = {}, {}
        for name, tensor in update.items():
            scales[name] = (_norm(tensor) if self.scheme == "qsgd" else _max_abs(tensor)) / levels
            scaled = tensor.abs() / scales[name] if scales[name] else torch.zeros_like(tensor)
            # The floor of x + U(0, 1) is x on average.
            uniform = torch.rand(tensor.shape, generator=context.rng, dtype=tensor.dtype)
            rounded = (scaled + uniform).floor().clamp_max(levels) * tensor.sign()
            integers[name] = rounded.to(torch.int8 if levels < 2**7 else torch.int16)
        return Payload.from_integers(integers, scales)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return for `sign` a smooth sign times the mean absolute value, else the gradient itself.

        The other roundings are unbiased. The smooth sign is a hyperbolic tangent, whose derivative
        lets an attack correct a wrong sign.
        """
        del sent
        if self.scheme != "sign":
            return gradient
        return {name: _smooth_sign(tensor) for name, tensor in gradient.items()}

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return the rounding to levels, or of half precision; None for `sign`, which is no rounding."""
        del facts
        if self.scheme == "sign":
            return None
        if self.scheme == "fp16":
            return MessageNoise(deviations={name: tensor.abs() * _HALF_PRECISION for name, tensor in sent.items()})
        steps: dict[str, float] = {}
        for name, tensor in sent.items():
            if (tensor != 0).any():
                steps[name] = _level_distance(tensor, self._levels)
        return MessageNoise(rounding_steps=steps)

    @property
    def _levels(self) -> int:
        """Return the number of levels above 0."""
        return 2 ** (self.bits - 1) - 1 if self.scheme == "qsgd" else 1


def _level_distance(sent: Tensor, levels: int) -> float:
    """Return the largest number of which all that was sent are multiples, up to `levels`.

    The smallest number that was sent need not be at the first level, above all in small tensors. It
    is returned where the numbers are no multiples.

    >>> round(_level_distance(torch.tensor([0.2, -0.6, 1.0, 0.0, 0.5]), 127), 3)
    0.1
    """
    sizes = sent[sent != 0].abs().double()
    smallest, largest = sizes.min(), sizes.max()
    for level in range(1, levels + 1):
        multiples = sizes * level / smallest
        if largest * level / smallest > levels + 0.5:
            break
        if (multiples - multiples.round()).abs().max() < _LEVEL_TOLERANCE:
            return (smallest / level).item()
    return smallest.item()


def _smooth_sign(tensor: Tensor) -> Tensor:
    scale = _mean(tensor.abs())
    width = (_SMOOTHING_WIDTH * scale.detach()).clamp_min(torch.finfo(tensor.dtype).tiny)
    return (tensor / width).tanh() * scale


def _mean(tensor: Tensor) -> Tensor:
    return tensor.mean() if tensor.numel() else tensor.new_zeros(())


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.to(tensor.dtype)


def _max_abs(tensor: Tensor) -> Tensor:
    return tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
