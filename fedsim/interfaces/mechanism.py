"""What a private mechanism draws, as its accountant is told: the facts from which ceilings follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsim.base.constraints import PositiveFloat, PositiveInt, PositiveShare, check_field_constraints

Noise = Literal["gaussian", "laplace"]
Unit = Literal["example", "client"]
Neighbours = Literal["added or removed", "replaced"]


@dataclass(frozen=True, kw_only=True, order=True)
class Mechanism:
    """Releases of a sum under independent noise, all alike, as one client sends them.

    Whoever sees all that the client sends learns no more than these releases, whatever was sent
    before: each may depend on the earlier ones.

    Attributes:
        noise: distribution of the noise of each number.
        scale: standard deviation of Gaussian noise, or mean absolute value of Laplace noise,
            divided by the largest distance between the sums of two neighbours, in the L2 norm or,
            for Laplace noise, the L1 norm.
        releases: how many there are.
        rate: probability of each example to be in the sum, independently (Poisson sampling); 1
            where no amplification is claimed.
        unit: what a neighbour differs in: one example, or the whole data of a client.
        neighbours: whether it is added or removed, or replaced.
    """

    noise: Noise = "gaussian"
    scale: PositiveFloat
    releases: PositiveInt = 1
    rate: PositiveShare = 1.0
    unit: Unit = "example"
    neighbours: Neighbours = "added or removed"

    def __post_init__(self) -> None:
        check_field_constraints(self, "mechanism: ")
