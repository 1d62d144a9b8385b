"""What a federation as a whole promises its clients, and the ledger of it.

Defenses are of single clients. Here stands what their server or their protocol adds: noise of a
trusted server (`fedsim.privacy.central`), or shares of noise under secure aggregation
(`fedsim.privacy.distributed`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fedsim.base.errors import ConfigError
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_tight_epsilon
from fedsim.privacy.mechanism_columns import describe_mechanism

SERVER = "server"
"""Value of the ledger's column `trusted` where the promise does not hold against the server."""
OTHER_CLIENTS = "other clients of a sum, to add their noise"
"""Its value where a promise relies on the noise of several clients."""
_MAX_NOISE = 1e6
"""Noise multiplier beyond which no noise is looked for."""
_NOISE_TOLERANCE = 1e-3
"""How far the noise for a wanted epsilon may be above the least one, as a share of it."""


@dataclass(frozen=True, kw_only=True)
class FederationPrivacy(ABC):
    """Mechanism by which a federation protects whole clients.

    Attributes:
        name: of its table in the experiment file, and in the ledger.
        trusted: who has to be trusted, as the ledger says it.
        in_clear: what is not covered, likewise.
        delta: probability bound at which epsilon is stated.
        clients: number of clients of the federation.
        rate: probability of each client to be asked, independently, where that amplifies; None
            where no amplification is claimed.
    """

    name: ClassVar[str]
    trusted: ClassVar[str]
    in_clear: ClassVar[str]
    delta: float
    clients: int
    rate: float | None = None

    @property
    def column(self) -> str:
        """Return the name of its column in `metrics.csv`."""
        return f"epsilon of {self.name}"

    @abstractmethod
    def mechanism(self, rounds: int = 1) -> Mechanism:
        """Return the mechanism of so many rounds of one client."""

    @abstractmethod
    def describe_strength(self) -> str:
        """Return clip and noise in a few words."""

    @abstractmethod
    def describe(self) -> str:
        """Say in a sentence to whom what is promised, and what is not."""

    def epsilon(self, rounds: int) -> float:
        """Return the privacy loss of a client in so many rounds, infinite where nothing is proved."""
        return compute_cached_epsilon(self.mechanism(rounds), self.delta) if rounds else 0.0


@lru_cache(maxsize=1 << 14)
def compute_cached_epsilon(mechanism: Mechanism, delta: float) -> float:
    """Compute the epsilon of a mechanism; many clients share one."""
    return compute_tight_epsilon(mechanism, delta)


def check_delta(delta: float, clients: int, table_name: str) -> None:
    """Raise ConfigError where `delta` lets all of one of the clients be published at random."""
    if delta * clients >= 1:
        raise ConfigError(
            f"{table_name}.delta: {delta:g} promises nothing to one of {clients} clients: to publish all of one at "
            f"random would be allowed; set it below {1 / clients:.3g}"
        )


def find_least_noise(make_mechanism: Callable[[float], Mechanism], epsilon: float, delta: float, where: str) -> float:
    """Find the least noise multiplier with which a mechanism keeps to `epsilon`.

    Args:
        make_mechanism: returns the mechanism of all rounds with a noise multiplier.
        epsilon: the privacy loss, above 0.
        delta: probability bound.

    >>> make = lambda noise: Mechanism(scale=noise, unit="client")
    >>> round(find_least_noise(make, 4.0, 1e-5, "epsilon"), 2)
    1.08
    """
    enough = 1.0
    while compute_cached_epsilon(make_mechanism(enough), delta) > epsilon:
        enough *= 2
        if enough > _MAX_NOISE:
            rounds = make_mechanism(1.0).releases
            raise ConfigError(
                f"{where}: {epsilon:g} at delta {delta:g} is not reached in {rounds} rounds, whatever the noise; ask "
                "for a larger epsilon, or for fewer rounds"
            )
    # Halve until it is too little, then bisect on a logarithmic scale.
    too_little = enough / 2
    while compute_cached_epsilon(make_mechanism(too_little), delta) <= epsilon:
        enough, too_little = too_little, too_little / 2
    while enough > too_little * (1 + _NOISE_TOLERANCE):
        middle = math.sqrt(enough * too_little)
        if compute_cached_epsilon(make_mechanism(middle), delta) <= epsilon:
            enough = middle
        else:
            too_little = middle
    return enough


class FederationLedger:
    """Ledger of what the federation has let out of each client.

    Attributes:
        privacy: the mechanism.
        epsilon: the largest privacy loss of any client so far.
    """

    def __init__(self, privacy: FederationPrivacy) -> None:
        self.privacy = privacy
        self.epsilon = 0.0
        self._rounds: Counter[int] = Counter()

    def count_round(self, number: int, asked: Mapping[int, bool]) -> list[dict[str, Any]]:
        """Count round `number`, and return its rows by the columns of the ledger.

        Args:
            asked: whether each client that was asked may send.
        """
        if self.privacy.rate is None:
            return [self._count_client(number, client, counts) for client, counts in sorted(asked.items())]
        # Amplification is over the draw, so those who were not drawn pay as well.
        return [self._count_client(number, client, True) for client in range(self.privacy.clients)]

    def count_row(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Count the round in a row of a file again."""
        return self._count_client(int(row["round"]), int(row["client"]), row["counts"] == "1")

    def _count_client(self, number: int, client: int, counts: bool) -> dict[str, Any]:
        privacy = self.privacy
        self._rounds[client] += counts
        epsilon = privacy.epsilon(self._rounds[client])
        self.epsilon = max(self.epsilon, epsilon)
        mechanism = privacy.mechanism()
        return {
            "round": number,
            "client": client,
            "defense": privacy.name,
            "num_examples": "",
            "batch_size": "",
            "steps": "",
            "rate": "" if privacy.rate is None else privacy.rate,
            "noise_multiplier": mechanism.scale,
            "counts": int(counts),
            "epsilon": epsilon,
            "delta": privacy.delta,
            **describe_mechanism(mechanism),
            "trusted": privacy.trusted,
            "in_clear": privacy.in_clear,
        }
