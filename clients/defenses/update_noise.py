"""Update clipping and noise: local differential privacy of a client's whole data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, PositiveShare, ShareBelowOne
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Guarantee, Participation
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, constant_deviations
from fedsim.recording.wire_format import State


def _gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype)


def _laplace(like: Tensor, rng: torch.Generator) -> Tensor:
    """Draw Laplace noise of scale 1, as the difference of two exponential draws."""
    first = torch.empty(like.shape, dtype=like.dtype).exponential_(generator=rng)
    second = torch.empty(like.shape, dtype=like.dtype).exponential_(generator=rng)
    return first - second


_DRAW_NOISE: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {"gaussian": _gaussian, "laplace": _laplace}
_MAX_CLIP_CHANGE = 1e6
"""Largest factor between `clip` and the C that follows the norms, in both directions."""


@dataclass(frozen=True, kw_only=True)
class UpdateNoise(Defense):
    """Clip the update to norm C, then add noise of scale sigma * C to each of its numbers.

    The whole update, all layers together, is one vector. Clients do this before sending, so the
    guarantee holds against the server itself: whatever data a client has, two of its updates differ
    by at most 2C, and the noise hides which one it was (client-level local differential privacy).

    - With Gaussian noise the norm is L2 and the standard deviation sigma * C; in each round,
      2 / sigma^2 of zero-concentrated privacy is lost.
    - With Laplace noise the norm is L1; in each round, epsilon = 2 / sigma is lost, and delta = 0.

    The guarantee is one about real numbers: leaks through the rounding of floating-point noise
    [Mironov2012] are not covered.

    With `quantile`, C follows a client's own norms. After each round it is multiplied by
    exp(-clip_rate * (b - quantile)), where b is 1 if the norm was at most C, otherwise 0. A client
    has no other clients to average b with, so noise that hides b makes C fluctuate. Without that
    noise, C would reveal private norms, and nothing would be proved; with it, b counts as sent. C
    stays between a millionth of `clip` and a million times it.

    If `noise_multiplier` is 0 and the norm at most C, the update is sent unchanged, to the bit.

    Args:
        clip: C, largest norm of an update, in units of the weights, or of the gradient where that
            is sent; with `quantile`, C of a client's first round.
        noise_multiplier: sigma, scale of the noise divided by C; 0 only clips.
        noise: `gaussian`, with scale = standard deviation, or `laplace`, with scale = mean absolute
            value.
        quantile: share of its rounds in which a client's norm should be at most C, below 1; 0 keeps
            C fixed.
        clip_rate: largest change of log C in a round without noise on b; 0.2 in the paper.
        bit_noise: scale of the noise on b, of the kind of `noise`; 0 adds none, and gives no
            guarantee.

    Raises:
        ConfigError: a setting is out of range, or `bit_noise` is given without `quantile`.

    References:
        [McMahan2018b] (clipping of updates); [Andrew2021], Sec. 2.1 (C follows a quantile);
        [Bun2016], Prop. 1.3, 1.4, 1.6 and Lemma 1.7 (the guarantee).
        Differs: each client adds its own noise, instead of the server once to the sum; C follows
        the norms of one client instead of those of all in a round, and stays with it.
    """

    clip: PositiveFloat = 1.0
    noise_multiplier: NonNegativeFloat = 0.0
    noise: Literal["gaussian", "laplace"] = "gaussian"
    quantile: ShareBelowOne = 0.0
    clip_rate: PositiveShare = 0.2
    bit_noise: NonNegativeFloat = 0.0

    promise: ClassVar[str] = (
        "(epsilon, delta)-differential privacy of a client's whole data, over all rounds; nothing where "
        "noise_multiplier is 0, or where C follows the norms and bit_noise is 0"
    )
    against: ClassVar[str] = (
        "the server and all who see what a client sends; all of them still see N, the metrics, and who takes part"
    )
    cost: ClassVar[str] = (
        "accuracy: noise grows with the number of weights, and is averaged over few clients; no more bytes, one draw "
        "a weight and round"
    )
    paper: ClassVar[Paper] = cite("McMahan2018b")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bit_noise and not self.quantile:
            raise ConfigError(
                f"bit_noise: expected 0 where the clip does not follow the norms, got {self.bit_noise}; set quantile, "
                "or leave bit_noise out"
            )

    def on_update(self, update: State, context: LocalContext) -> State:
        """Return the clipped and noisy update, and adapt C for the next round."""
        clip = context.memory["clip"].item() if "clip" in context.memory else self.clip
        norm = self._norm(update)
        factor, scale = _clip_factor(norm, clip).item(), self.noise_multiplier * clip
        sent = dict(update)
        if factor != 1 or scale:
            draw_noise = _DRAW_NOISE[self.noise]
            sent = {name: tensor * factor + scale * draw_noise(tensor, context.rng) for name, tensor in update.items()}
        if self.quantile:
            context.memory["clip"] = self._next_clip(clip, norm, context.rng)
        return sent

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """Return the privacy loss over all rounds.

        Each round releases an update of sensitivity 2C and, where C follows the norms, b of
        sensitivity 1. With Laplace noise, the smaller epsilon of the two ways of composition
        counts.
        """
        if not self.noise_multiplier or (self.quantile and not self.bit_noise):
            return None
        losses = [2 / self.noise_multiplier]
        if self.quantile:
            losses.append(1 / self.bit_noise)
        rho = participation.rounds * sum(loss**2 / 2 for loss in losses)
        epsilon, accountant = rho + 2 * math.sqrt(rho * math.log(1 / delta)), "zero-concentrated DP"
        pure_epsilon = participation.rounds * sum(losses)
        if self.noise == "laplace" and pure_epsilon <= epsilon:
            epsilon, delta, accountant = pure_epsilon, 0.0, "sum of the epsilons of the rounds"
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            neighbours="one client's whole data replaced (local model, no amplification by sampling)",
            accountant=accountant,
        )

    def compose_guarantees(self, participations: Sequence[Participation], delta: float) -> Guarantee | None:
        """Return the privacy loss over all rounds, whatever their batch sizes and steps."""
        rounds = sum(participation.rounds for participation in participations)
        return self.guarantee(replace(participations[0], rounds=rounds), delta)

    def mechanism(self, participation: Participation) -> Mechanism | None:
        """Return noise over a distance of 2C; None where C follows the norms, or without noise."""
        if not self.noise_multiplier or self.quantile:
            return None
        return Mechanism(
            noise=self.noise,
            scale=self.noise_multiplier / 2,
            releases=participation.rounds,
            unit="client",
            neighbours="replaced",
        )

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient clipped to C; the noise has mean zero, and is ignored.

        A C that follows the norms is not known, so the gradient is then not clipped.
        """
        del sent
        if self.quantile:
            return gradient
        factor = _clip_factor(self._norm(gradient), self.clip)
        return {name: tensor * factor for name, tensor in gradient.items()}

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return the noise; Laplace noise counts as Gaussian of the same variance.

        None where C follows the norms, since it is not known then.
        """
        del facts
        if self.quantile:
            return None
        deviation = self.noise_multiplier * self.clip * (math.sqrt(2) if self.noise == "laplace" else 1.0)
        return MessageNoise(deviations=constant_deviations(sent, deviation))

    def _norm(self, update: State) -> Tensor:
        """Return the L1 or L2 norm of all tensors together, in float64, differentiable."""
        order = 1 if self.noise == "laplace" else 2
        norms = [torch.linalg.vector_norm(tensor.double(), order) for tensor in update.values()]
        return torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.zeros((), dtype=torch.float64)

    def _next_clip(self, clip: float, norm: Tensor, rng: torch.Generator) -> Tensor:
        """Return C of the client's next round, in float64."""
        bit = (norm <= clip).double()
        noisy_bit = bit + self.bit_noise * _DRAW_NOISE[self.noise](bit, rng)
        next_clip: Tensor = clip * torch.exp(-self.clip_rate * (noisy_bit - self.quantile))
        return next_clip.clamp(self.clip / _MAX_CLIP_CHANGE, self.clip * _MAX_CLIP_CHANGE)


def _clip_factor(norm: Tensor, clip: float) -> Tensor:
    """Return the factor, at most 1, that clips a vector of this norm to `clip`."""
    return clip / norm.clamp(min=clip)
