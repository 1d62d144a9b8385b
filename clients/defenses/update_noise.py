"""Update clipping plus noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.attacks import Paper
from fedsim.defense import Defense, Guarantee, Participation
from fedsim.errors import ConfigError
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class UpdateNoise(Defense):
    """Clip the update to L2 norm C, then add Gaussian noise of standard deviation sigma * C.

    The whole update, all layers together, is one vector. Because every client does this before
    sending, the promise holds against the server itself.

    Args:
        clip: C, largest L2 norm of an update; in units of the weights, or of the gradient where that is sent.
        noise_multiplier: sigma, noise standard deviation divided by C; 0 only clips.

    References:
        McMahan et al.: Learning Differentially Private Recurrent Language Models, ICLR 2018
        (clipping of updates); Bun and Steinke: Concentrated Differential Privacy, TCC 2016
        (Prop. 1.3, 1.6 and Lemma 1.7: the guarantee).
        Differs: noise is added by each client instead of once to the sum.
    """

    clip: float = 1.0
    noise_multiplier: float = 0.0

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
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ConfigError(f"noise_multiplier: expected a finite value of at least 0, got {self.noise_multiplier}")

    def on_update(self, update: State, *, rng: torch.Generator) -> State:
        """See Defense. A zero update stays zero before the noise."""
        norm = math.sqrt(sum(t.double().square().sum().item() for t in update.values()))
        factor = min(1.0, self.clip / norm) if norm else 1.0
        deviation = self.noise_multiplier * self.clip
        return {
            name: t * factor + deviation * torch.randn(t.shape, generator=rng, dtype=t.dtype)
            for name, t in update.items()
        }

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """See Defense. Any two data sets of a client lead to updates at most 2C apart."""
        if not self.noise_multiplier:
            return None
        rho = participation.rounds * 2 / self.noise_multiplier**2
        return Guarantee(
            epsilon=rho + 2 * math.sqrt(rho * math.log(1 / delta)),
            delta=delta,
            neighbours="one client's whole data replaced (local model, no amplification by sampling)",
            accountant="zero-concentrated DP",
        )
