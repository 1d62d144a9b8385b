"""Check that sums under secure aggregation can carry the clients' noise, and choose how much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedsim.base.errors import ConfigError
from fedsim.federation.central_privacy import check_released_state
from fedsim.federation.privacy_tables import MIN_BITS, DistributedPrivacyTable, SecureAggregationTable
from fedsim.federation.secure_aggregation import MODULUS, group_sizes
from fedsim.privacy.distributed import (
    DISTRIBUTED_PRIVACY,
    DistributedPrivacy,
    bound_grid_length,
    make_distributed_mechanism,
)
from fedsim.privacy.federation_privacy import check_delta, find_least_noise

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class SumGroups:
    """What clients of a round send for their sums.

    Attributes:
        table: settings of secure aggregation.
        num_asked: number of clients of a round.
        dimension: how many numbers each sends.
    """

    table: SecureAggregationTable
    num_asked: int
    dimension: int

    @property
    def step(self) -> float:
        """Return the step of the grid, in units of the update."""
        return grid_step(self.table.clip, self.table.bits)


def grid_step(clip: float, bits: int) -> float:
    """Return the step of the grid to which secure aggregation rounds numbers from -clip to clip."""
    return 2 * clip / (1 << bits)


def make_distributed_privacy(
    table: DistributedPrivacyTable, groups: SumGroups, clients: int, rounds: int
) -> DistributedPrivacy:
    """Return the mechanism that a table describes."""
    check_delta(table.delta, clients, DISTRIBUTED_PRIVACY)
    sizes = group_sizes(groups.table.groups, groups.num_asked)
    distance = bound_grid_length(table.clip, groups.step, groups.dimension)
    noise = table.noise_multiplier
    if noise is None:
        assert table.epsilon is not None
        noise = find_least_noise(
            lambda noise: make_distributed_mechanism(noise, distance, groups.dimension, rounds),
            table.epsilon,
            table.delta,
            f"{DISTRIBUTED_PRIVACY}.epsilon",
        )
    privacy = DistributedPrivacy(
        delta=table.delta,
        clients=clients,
        clip=table.clip,
        noise_multiplier=noise,
        step=groups.step,
        dimension=groups.dimension,
        shares=groups.table.min_survivors(sizes[-1]),
    )
    _check_modulus(privacy, groups.table, sizes[0])
    return privacy


def _check_modulus(privacy: DistributedPrivacy, table: SecureAggregationTable, largest_group: int) -> None:
    """Raise ConfigError where a sum with its noise would not fit, and name the bits that do."""
    for bits in range(table.bits, MIN_BITS - 1, -1):
        coarser = replace(privacy, step=grid_step(table.clip, bits))
        if coarser.find_largest_sum(1 << bits, largest_group) >= MODULUS / 2:
            continue
        if bits == table.bits:
            return
        remedy = f"expected at most {bits} bits"
        break
    else:
        remedy = "no grid is coarse enough; lower the noise or distributed_privacy.clip, or raise epsilon"
    raise ConfigError(
        f"secure_aggregation.bits: sums are taken modulo 2^32, and those over {largest_group} clients with "
        f"{table.bits} bits and noise multiplier {privacy.noise_multiplier:.4g} may be larger; {remedy}"
    )


def check_distributed_privacy(experiment: Experiment) -> None:
    """Check that there are sums to which clients add their noise."""
    if experiment.config.secure_aggregation is None:
        raise ConfigError(
            f"{DISTRIBUTED_PRIVACY}: a client adds a share of noise, which is enough in a sum alone, and without "
            "[secure_aggregation] the server sees each update; add that table, or use [central_privacy] or a defense"
        )
    check_released_state(experiment, DISTRIBUTED_PRIVACY)
