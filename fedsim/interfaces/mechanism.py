"""What a private mechanism draws, as its accountant is told: the facts from which ceilings follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsim.base.constraints import PositiveFloat, PositiveInt, PositiveShare, check_field_constraints
from fedsim.base.errors import ConfigError

Noise = Literal["gaussian", "laplace", "skellam"]
Unit = Literal["example", "client"]
Neighbours = Literal["added or removed", "replaced"]


@dataclass(frozen=True, kw_only=True, order=True)
class Mechanism:
    """Releases of a sum under independent noise, all alike, as one client sends them.

    An observer of all that the client sends learns no more than these releases, whatever was sent
    before: each may depend on the earlier ones.

    Attributes:
        noise: distribution of the noise of each number.
        scale: standard deviation of Gaussian or Skellam noise, or mean absolute value of Laplace
            noise, divided by the largest distance between the sums of two neighbours, in the L2 norm or,
            for Laplace noise, the L1 norm.
        releases: how many there are.
        rate: probability of each example to be in the sum, independently (Poisson sampling); 1
            where no amplification is claimed.
        unit: what a neighbour differs in: one example, or the whole data of a client.
        neighbours: whether it is added or removed, or replaced.
        distance: of Skellam noise, the largest L2 distance between the sums of two neighbours, in
            steps of the grid of integers.
        dimension: of Skellam noise, how many integers a release has.
    """

    noise: Noise = "gaussian"
    scale: PositiveFloat
    releases: PositiveInt = 1
    rate: PositiveShare = 1.0
    unit: Unit = "example"
    neighbours: Neighbours = "added or removed"
    distance: PositiveFloat | None = None
    dimension: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_field_constraints(self, "mechanism: ")
        if self.noise == "skellam" and (self.distance is None or self.dimension is None or self.rate != 1):
            raise ConfigError(
                "mechanism: of Skellam noise the distance and the dimension are needed, and no amplification is "
                "proved here; name both, and leave the rate at 1"
            )
