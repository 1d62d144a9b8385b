"""Check that a federation can aggregate securely: its groups, strategy, weights and defenses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.strategy_checks import sample_size
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_checks import name_of_defense

MODULUS = 1 << 32
"""Modulus of sums, as in Flower's SecAgg+."""
SENT_MASKED = (
    "what a client sends for its sum is not recorded: by Flower's SecAgg+ 8 bytes for each number, "
    "masked, and keys and shares"
)
"""Explains why the bytes of sums are not those of clients."""
SINGLE_UPDATE_STRATEGIES = {
    **dict.fromkeys(("Krum", "MultiKrum", "Bulyan"), "chooses among the updates of single clients"),
    **dict.fromkeys(("FedMedian", "FedTrimmedAvg"), "sorts the updates of single clients"),
    "QFedAvg": "weights each client by its own loss",
    "FedDyn": "counts the moves of all clients alike",
    "DifferentialPrivacyServerSideFixedClipping": "clips the update of each client",
    "DifferentialPrivacyServerSideAdaptiveClipping": "clips the update of each client",
}
"""Strategies, by class name, that need the updates of single clients, and what for."""


def group_sizes(groups: int | str, clients: int) -> list[int]:
    """Return the number of clients in each group of a round with `clients`, larger groups first.

    Where `clients` is no multiple of `groups`, some groups are larger, and none is smaller.

    >>> group_sizes(3, 10)
    [4, 3, 3]
    """
    count = 1 if groups == "all" else clients // int(groups)
    if not count:
        return []
    smallest, remainder = divmod(clients, count)
    return [smallest + (group < remainder) for group in range(count)]


def check_groups(table: SecureAggregationTable, strategy: Any, settings: Mapping[str, Any], clients: int) -> None:
    """Check that a round can be split into such groups, and that the strategy can work with sums."""
    name = type(strategy).__name__
    if name in SINGLE_UPDATE_STRATEGIES:
        raise ConfigError(
            f"strategy: {name} {SINGLE_UPDATE_STRATEGIES[name]}, and under secure aggregation the "
            "server sees sums over groups alone; choose a strategy that averages, as fedavg"
        )
    if settings.get("weighted_by_key", "num-examples") != "num-examples":
        raise ConfigError(
            "strategy.weighted_by_key: under secure aggregation clients are weighted by "
            f"'num-examples', got {settings['weighted_by_key']!r}; leave it out"
        )
    # Groups need enough members, and room for their sums.
    count = sample_size(settings, clients)
    sizes = group_sizes(table.groups, count)
    if not sizes or sizes[-1] < 2:
        raise ConfigError(
            f"secure_aggregation.groups: {table.groups}, but a round has {count} of the {clients} "
            "clients, and a group at least 2; sample more (strategy.fraction_train), or make "
            "groups smaller"
        )
    if table.min_survivors(sizes[-1]) > sizes[-1]:
        raise ConfigError(
            f"secure_aggregation.threshold: {table.threshold} of a group have to answer, but a "
            f"round has groups of {sizes[-1]}; lower it"
        )
    if sizes[0] << table.bits >= MODULUS:
        max_bits = int(math.log2((MODULUS - 1) / sizes[0]))
        raise ConfigError(
            f"secure_aggregation.bits: sums are taken modulo 2^32, and those over {sizes[0]} "
            f"clients with {table.bits} bits may be larger; expected at most {max_bits}"
        )


def check_weights(table: SecureAggregationTable, counts: Sequence[int]) -> None:
    """Raise ConfigError where a client's weight would be rounded to nothing.

    Args:
        counts: number of examples N that each client reports.
    """
    smallest, largest = min(counts), max(counts)
    if round(smallest / largest * 2**table.bits) < 1:
        min_bits = math.floor(math.log2(largest / smallest / 2)) + 1
        raise ConfigError(
            f"secure_aggregation.bits: the weight of a client with {smallest} of at most {largest} "
            f"examples is rounded to 0 with {table.bits} bits, so that its update would not count; "
            f"expected at least {min_bits}"
        )


def check_defenses(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError where a defense sends an update that cannot be summed under masks."""
    for defense in defenses:
        if not defense.summable:
            raise ConfigError(
                f"defense: {name_of_defense(defense)} sends the update in another form, and under "
                "secure aggregation clients send masked integers, one for each number, so nothing "
                "is left of it, and a number that one client alone sends would be in the sum as it is; leave it out, "
                "or use random-mask with common = true, whose clients leave out the same numbers"
            )
