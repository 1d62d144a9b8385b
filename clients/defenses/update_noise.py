"""Update clipping plus noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.defense import Defense, Guarantee, Memory, Participation
from fedsim.errors import ConfigError
from fedsim.wire.messages import State


def _gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype)


def _laplace(like: Tensor, rng: torch.Generator) -> Tensor:
    """Of scale 1: the difference of two exponential draws."""
    one, other = (torch.empty(like.shape, dtype=like.dtype).exponential_(generator=rng) for _ in range(2))
    return one - other


_DRAWS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {"gaussian": _gaussian, "laplace": _laplace}
_FURTHEST = 1e6
"""C follows the norms up to this many times `clip`, and down to this part of it."""


@dataclass(frozen=True, kw_only=True)
class UpdateNoise(Defense):
    """Clip the update to norm C, then add noise of scale sigma * C to each of its numbers.

    The whole update, all layers together, is one vector. Because every client does this before sending, the promise
    holds against the server itself: whatever a client holds, two updates of it are at most 2C apart, and the noise
    hides which one it was (client-level local differential privacy). With Gaussian noise the norm is L2 and the
    standard deviation sigma * C; in each round 2 / sigma^2 of zero-concentrated privacy is lost. With Laplace noise the
    norm is L1, and in each round epsilon = 2 / sigma is lost, with delta = 0. The promise is one about real numbers:
    what the rounding of floating-point noise may tell (Mironov, CCS 2012) is not covered.

    With `quantile`, C follows a client's own norms. After each round it is multiplied by
    exp(-clip_rate * (b - quantile)), where b is 1 if the norm was at most C, otherwise 0. A client has no others to
    average b with, so noise that hides b makes C wander. Without that noise C would tell of private norms, and nothing
    would be proved; with it, b counts as sent. C stays between a millionth of `clip` and a million times it.

    If `noise_multiplier` is 0 and the norm at most C, the update is sent as it is, to the bit.

    Args:
        clip: C, largest norm of an update, in units of the weights, or of the gradient where that is sent; with
            `quantile` that of a client's first round.
        noise_multiplier: sigma, scale of the noise divided by C; 0 only clips.
        noise: `gaussian`, whose scale is its standard deviation, or `laplace`, whose mean absolute value it is.
        quantile: share of its rounds in which a client's norm is to be at most C, below 1; 0 leaves C as it is.
        clip_rate: largest change of log C in a round that has no noise on b; 0.2 in the paper.
        bit_noise: scale of the noise on b, of the kind of `noise`; 0 adds none, and gives no guarantee.

    Raises:
        ConfigError: a setting is out of range, or `bit_noise` is given without `quantile`.

    References:
        McMahan et al.: Learning Differentially Private Recurrent Language Models, ICLR 2018 (clipping of updates);
        Andrew et al.: Differentially Private Learning with Adaptive Clipping, NeurIPS 2021 (Sec. 2.1: C follows a
        quantile); Bun and Steinke: Concentrated Differential Privacy, TCC 2016 (Prop. 1.3, 1.4, 1.6 and Lemma 1.7:
        the guarantee).
        Differs: each client adds its own noise, instead of the server once to the sum; C follows the norms of one
        client instead of those of all in a round, and stays with it.
    """

    clip: float = 1.0
    noise_multiplier: float = 0.0
    noise: Literal["gaussian", "laplace"] = "gaussian"
    quantile: float = 0.0
    clip_rate: float = 0.2
    bit_noise: float = 0.0

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
    paper: ClassVar[Paper] = Paper(
        title="Learning Differentially Private Recurrent Language Models",
        authors="McMahan, Ramage, Talwar, Zhang",
        venue="ICLR",
        year=2018,
        url="https://arxiv.org/abs/1710.06963",
    )

    def __post_init__(self) -> None:
        if not (self.clip > 0 and math.isfinite(self.clip)):
            raise ConfigError(f"clip: expected a finite value above 0, got {self.clip}")
        for name in ("noise_multiplier", "bit_noise"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name}: expected a finite value of at least 0, got {value}")
        if self.noise not in _DRAWS:
            raise ConfigError(f"noise: expected {' or '.join(map(repr, _DRAWS))}, got {self.noise!r}")
        if not 0 <= self.quantile < 1:
            raise ConfigError(
                f"quantile: expected a share above 0, below 1, or 0 for a fixed clip, got {self.quantile}"
            )
        if not 0 < self.clip_rate <= 1:
            raise ConfigError(f"clip_rate: expected a value above 0, at most 1, got {self.clip_rate}")
        if self.bit_noise and not self.quantile:
            raise ConfigError(
                f"bit_noise: expected 0 where the clip does not follow the norms, got {self.bit_noise}; set quantile, "
                "or leave bit_noise out"
            )

    def on_update(self, update: State, *, rng: torch.Generator, memory: Memory) -> State:  # type: ignore[override]
        """See Defense. A zero update stays zero before the noise."""
        clip = memory["clip"].item() if "clip" in memory else self.clip
        norm = self._norm(update)
        factor, scale = _shrinking(norm, clip).item(), self.noise_multiplier * clip
        sent = dict(update)
        if factor != 1 or scale:
            draw = _DRAWS[self.noise]
            sent = {name: t * factor + scale * draw(t, rng) for name, t in update.items()}
        if self.quantile:
            memory["clip"] = self._next_clip(clip, norm, rng)
        return sent

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """See Defense. Each round shows an update of sensitivity 2C and, where C follows the norms, b of 1."""
        if not self.noise_multiplier or (self.quantile and not self.bit_noise):
            return None
        shown = [2 / self.noise_multiplier, *([1 / self.bit_noise] if self.quantile else [])]
        rho = participation.rounds * sum(loss**2 / 2 for loss in shown)
        epsilon, accountant = rho + 2 * math.sqrt(rho * math.log(1 / delta)), "zero-concentrated DP"
        if self.noise == "laplace" and (pure := participation.rounds * sum(shown)) <= epsilon:
            epsilon, delta, accountant = pure, 0.0, "sum of the epsilons of the rounds"
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            neighbours="one client's whole data replaced (local model, no amplification by sampling)",
            accountant=accountant,
        )

    def composed(self, done: Sequence[Participation], delta: float) -> Guarantee | None:
        """See Defense. How a client trained makes no difference, so rounds of all kinds count alike."""
        return self.guarantee(replace(done[0], rounds=sum(some.rounds for some in done)), delta)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. Clipped to C; noise has the expectation zero, and a C that follows the norms is not known."""
        del sent
        if self.quantile:
            return gradient
        factor = _shrinking(self._norm(gradient), self.clip)
        return {name: tensor * factor for name, tensor in gradient.items()}

    def _norm(self, update: State) -> Tensor:
        """Of all tensors together, in float64, differentiable."""
        order = 1 if self.noise == "laplace" else 2
        each = [torch.linalg.vector_norm(tensor.double(), order) for tensor in update.values()]
        return torch.linalg.vector_norm(torch.stack(each), order) if each else torch.zeros((), dtype=torch.float64)

    def _next_clip(self, clip: float, norm: Tensor, rng: torch.Generator) -> Tensor:
        """C of the client's next round, in float64."""
        bit = (norm <= clip).double()
        noisy = bit + self.bit_noise * _DRAWS[self.noise](bit, rng)
        following: Tensor = clip * torch.exp(-self.clip_rate * (noisy - self.quantile))
        return following.clamp(self.clip / _FURTHEST, self.clip * _FURTHEST)


def _shrinking(norm: Tensor, clip: float) -> Tensor:
    """The factor, at most 1, that brings a vector of this norm down to `clip`."""
    return clip / norm.clamp(min=clip)
