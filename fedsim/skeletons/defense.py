"""Skeleton, a defense for fedsim.

`fedsim check fedsim.skeletons.defense:Skeleton` tries it, and `fedsim run skeleton.toml` attacks clients that have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.attacks import Paper
from fedsim.defense import NO_GUARANTEE, Defense
from fedsim.errors import ConfigError
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class Skeleton(Defense):
    """Add Gaussian noise to each tensor of the update, in proportion to its size.

    Args:
        share: standard deviation of the noise, over the root mean square of the tensor that it is added to.

    References:
        Authors: Title, Venue, Year, Equation. Differs: say where you depart from it, and why.
    """

    # The fields are the settings. An experiment file sets them by the same names, in values of these types.
    share: float = 0.5

    # What is proved, in a few words; override `guarantee` where there is an epsilon.
    promise: ClassVar[str] = NO_GUARANTEE
    against: ClassVar[str] = "the server, which sees the noisy update"
    cost: ClassVar[str] = "accuracy, more of it with more noise"
    # What the report cites.
    paper: ClassVar[Paper] = Paper(title="Skeleton", authors="Nobody yet", venue="unpublished", year=2026)

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise ConfigError(f"share: expected a value above 0, got {self.share}")

    # Other hooks are `on_data` (which examples take part), `sampling` (how batches are drawn), `on_batch`,
    # `on_features`, `on_examples` (one gradient an example) and `on_gradient` (in each local step). Each gets copies,
    # and returns tensors of the same names and shapes. `memory`, a further parameter, is kept from round to round.
    def on_update(self, update: State, *, rng: torch.Generator) -> State:
        """Replace what the client is about to send, w_T - w_t, by name. Draw from `rng` alone."""
        return {
            name: change + self.share * change.square().mean().sqrt() * torch.randn(change.shape, generator=rng)
            for name, change in update.items()
        }

    def adversary_view(self, gradient: State, sent: State) -> State:
        """What an adversary who knows the defense makes of the gradient of its dummy data; see Defense.

        Noise has the expectation zero, so here it is the gradient itself. Without this method nobody knows, and no
        attack counts as one that knew the defense.
        """
        del sent
        return gradient
