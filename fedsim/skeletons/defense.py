"""Skeleton, a defense for fedsim.

Check it with `fedsim check fedsim.skeletons.defense:Skeleton`, and attack clients that use it with
`fedsim run skeleton.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.base.constraints import PositiveFloat
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import NO_GUARANTEE, Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class Skeleton(Defense):
    """Add Gaussian noise to each tensor of the update, in proportion to its size.

    Args:
        share: standard deviation of the noise, over the root mean square of the tensor that it is
            added to.

    References:
        Authors: Title, Venue, Year, Equation. Differs: say where you depart from it, and why.
    """

    # The fields are the settings. An experiment file sets them by the same names. Their types say
    # which values are accepted; `fedsim.base.constraints` has more of them.
    share: PositiveFloat = 0.5

    # The proved guarantee in a few words; override `guarantee` where there is an epsilon.
    promise: ClassVar[str] = NO_GUARANTEE
    against: ClassVar[str] = "the server, which sees the noisy update"
    cost: ClassVar[str] = "accuracy, more of it with more noise"
    # What the report cites.
    paper: ClassVar[Paper] = Paper(title="Skeleton", authors="Nobody yet", venue="unpublished", year=2026)

    # Other hooks: `on_data` (choice of examples), `sampling` (of batches), `on_batch`,
    # `on_features`, `on_examples` (per-example gradients) and `on_gradient` (in each local step).
    # Each gets copies, and returns tensors of the same names and shapes. `context` has what else it
    # may use; `context.memory` lasts from round to round.
    def on_update(self, update: State, context: LocalContext) -> State:
        """Replace the update w_T - w_t, by name, before it is sent; draw from `context.rng` alone."""
        return {
            name: change + self.share * change.square().mean().sqrt() * torch.randn(change.shape, generator=context.rng)
            for name, change in update.items()
        }

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Model the defense's effect on the gradient of dummy data, for an adversary that knows it.

        The noise has expectation zero, so this is the gradient itself. Without this method, no
        attack can adapt to the defense.
        """
        del sent
        return gradient
