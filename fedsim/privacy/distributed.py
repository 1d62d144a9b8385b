"""Distributed differential privacy: what sums under secure aggregation tell of one client.

Each client clips its update to L2 norm C, rounds it to the grid of the protocol, and adds a share
of Skellam noise before it masks. The server sees the sum of updates and of shares alone. Shares are
made for the fewest clients whose sum can be unmasked: with fewer the sum is lost, so a drop-out
never leaves less noise than is accounted for, and whoever answers beyond adds more.

Rounding moves each number by less than a step, so an update of norm C is at most C / step + sqrt(d)
steps long. That holds for any rounding, so nothing has to be drawn again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.federation_privacy import OTHER_CLIENTS, FederationPrivacy

DISTRIBUTED_PRIVACY = "distributed_privacy"
"""Name of this mechanism in the ledger, as that of its table in the experiment file."""
_ROUNDING_ERROR = 1 + 1e-9
"""Factor that covers the rounding of float64 numbers."""
_DEVIATIONS_WITHIN = 12
"""How many standard deviations of noise have to fit beside the sum; a Skellam number is beyond
twelve of its own in less than one of 10^12 cases, also where they are few steps."""


@dataclass(frozen=True, kw_only=True)
class DistributedPrivacy(FederationPrivacy):
    """Shares of noise of the clients of one group.

    Attributes:
        clip: C, L2 norm to which each client clips its update.
        noise_multiplier: z, standard deviation of the noise of the smallest sum that can be
            unmasked, divided by the largest length of an update on the grid.
        step: of the grid, in units of the update.
        dimension: d, how many numbers a client sends.
        shares: number of clients whose shares together are the noise that is accounted for.
    """

    name: ClassVar[str] = DISTRIBUTED_PRIVACY
    trusted: ClassVar[str] = OTHER_CLIENTS
    in_clear: ClassVar[str] = "who answered, the sum of N, and metrics of evaluation"
    clip: float
    noise_multiplier: float
    step: float
    dimension: int
    shares: int

    @property
    def distance(self) -> float:
        """Return the largest length of an update on the grid, in steps."""
        return bound_grid_length(self.clip, self.step, self.dimension)

    @property
    def share_variance(self) -> float:
        """Return the variance of one client's share, in squared steps."""
        return (self.noise_multiplier * self.distance) ** 2 / self.shares

    def mechanism(self, rounds: int = 1) -> Mechanism:
        """Return the mechanism of so many rounds of one client."""
        return make_distributed_mechanism(self.noise_multiplier, self.distance, self.dimension, rounds)

    def draw_share(self, size: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one client's share of the noise, in steps."""
        rate = self.share_variance / 2
        return rng.poisson(rate, size) - rng.poisson(rate, size)

    def find_largest_sum(self, levels: int, clients: int) -> float:
        """Return how far a sum over so many clients may be from its middle, in steps."""
        return clients * levels / 2 + _DEVIATIONS_WITHIN * math.sqrt(clients * self.share_variance)

    def describe_strength(self) -> str:
        """Return clip and noise in a few words."""
        return (
            f"clip {self.clip:g}, noise multiplier {self.noise_multiplier:.4g} from the shares of {self.shares} clients"
        )

    def describe(self) -> str:
        """Say in a sentence to whom what is promised, and what is not."""
        return (
            "the unit is a client, whose update is taken for zeros; it holds against the server and all who see the "
            f"sums, as long as the protocol hides single updates and at least {self.shares} clients of each sum add "
            "their share of noise, those who work with the server not counted; who answered, the sum of N, and what "
            "clients measure on held-out examples are in clear; no amplification is claimed; Rényi divergences of the "
            "Skellam mechanism (dp-accounting)"
        )


def bound_grid_length(clip: float, step: float, dimension: int) -> float:
    """Return the largest length, in steps, of an update of norm `clip` that was rounded to the grid.

    >>> bound_grid_length(clip=1.0, step=0.01, dimension=400) > 120
    True
    """
    return (clip / step + math.sqrt(dimension)) * _ROUNDING_ERROR


def make_distributed_mechanism(noise: float, distance: float, dimension: int, rounds: int) -> Mechanism:
    """Return the Skellam mechanism of clients."""
    return Mechanism(
        noise="skellam", scale=noise, releases=rounds, unit="client", distance=distance, dimension=dimension
    )
