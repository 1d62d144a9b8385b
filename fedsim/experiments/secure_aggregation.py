"""Whether a federation can aggregate securely: groups of clients, strategies and defenses that go with sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.defense import Defense, called
from fedsim.errors import ConfigError
from fedsim.experiments.config import SecureAggregationTable
from fedsim.experiments.strategy_checks import sampled

MODULUS = 1 << 32
"""Numbers are summed modulo this one, as by Flower's SecAgg+."""
SENT_MASKED = (
    "what a client sends for its sum is not recorded: by Flower's SecAgg+ 8 bytes for each number, masked, and keys "
    "and shares"
)
"""Why the bytes of sums are not those of clients."""
_SINGLE = {
    **dict.fromkeys(("Krum", "MultiKrum", "Bulyan"), "chooses among the updates of single clients"),
    **dict.fromkeys(("FedMedian", "FedTrimmedAvg"), "sorts the updates of single clients"),
    "QFedAvg": "weights each client by its own loss",
    "DifferentialPrivacyServerSideFixedClipping": "clips the update of each client",
    "DifferentialPrivacyServerSideAdaptiveClipping": "clips the update of each client",
}
"""Strategies, by the names of their classes, that need what nobody sees, and what for."""


def group_sizes(groups: int | str, clients: int) -> list[int]:
    """How many clients are in each group of a round of so many `clients`, larger groups first.

    Where these do not divide by `groups`, some groups are larger, and none is smaller.
    """
    count = 1 if groups == "all" else clients // int(groups)
    return [clients // count + (place < clients % count) for place in range(count)] if count else []


def check_groups(table: SecureAggregationTable, strategy: Any, settings: Mapping[str, Any], clients: int) -> None:
    """Raise ConfigError where a round of this strategy cannot be cut into such groups, or it cannot do with sums.

    Args:
        strategy: made of `settings`.
        clients: of the federation.
    """
    name = type(strategy).__name__
    if name in _SINGLE:
        raise ConfigError(
            f"strategy: {name} {_SINGLE[name]}, and under secure aggregation the server sees sums over groups alone; "
            "choose a strategy that averages, as fedavg"
        )
    if settings.get("weighted_by_key", "num-examples") != "num-examples":
        raise ConfigError(
            f"strategy.weighted_by_key: under secure aggregation clients are weighted by 'num-examples', got "
            f"{settings['weighted_by_key']!r}; leave it out"
        )
    count = sampled(settings, clients)
    sizes = group_sizes(table.groups, count)
    if not sizes or sizes[-1] < 2:
        raise ConfigError(
            f"secure_aggregation.groups: {table.groups}, but a round has {count} of the {clients} clients, and a group "
            "at least 2; sample more (strategy.fraction_train), or make groups smaller"
        )
    if table.survivors(sizes[-1]) > sizes[-1]:
        raise ConfigError(
            f"secure_aggregation.threshold: {table.threshold} of a group have to answer, but a round has groups of "
            f"{sizes[-1]}; lower it"
        )
    if sizes[0] << table.bits >= MODULUS:
        most = int(math.log2((MODULUS - 1) / sizes[0]))
        raise ConfigError(
            f"secure_aggregation.bits: sums are taken modulo 2^32, and those over {sizes[0]} clients with {table.bits} "
            f"bits may be larger; expected at most {most}"
        )


def check_weights(table: SecureAggregationTable, counts: Sequence[int]) -> None:
    """Raise ConfigError where a client's weight would be rounded to nothing.

    Args:
        counts: what each client reports as N.
    """
    least, most = min(counts), max(counts)
    if round(least / most * 2**table.bits) < 1:
        needed = math.floor(math.log2(most / least / 2)) + 1
        raise ConfigError(
            f"secure_aggregation.bits: the weight of a client with {least} of at most {most} examples is rounded to 0 "
            f"with {table.bits} bits, so that its update would not count; expected at least {needed}"
        )


def check_defenses(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError where a defense sends what cannot be summed under masks."""
    for defense in defenses:
        if not defense.summable:
            raise ConfigError(
                f"defense: {called(defense)} sends an update in a form of its own, and under secure aggregation "
                "clients send masked integers, one for each number, so nothing is left of it; leave it out, or use "
                "random-mask with common = true, whose clients leave out the same numbers"
            )
