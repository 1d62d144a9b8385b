"""Central differential privacy: what the models that a trusted server releases tell of one client.

In each round the server clips the update of each client to norm C, sums the clipped updates, adds
Gaussian noise, and divides by the number of clients that a round is meant to have. All clients
count alike: with weights N, one client could move the sum by more than C. Whoever sees the models
alone, as other clients do, learns of one client no more than the noise lets through. The server
itself sees each update before, so against it nothing is promised.

The budget is composed by privacy loss distributions of dp-accounting. Amplification by sampling is
claimed for clients that are drawn independently (Poisson) alone. There each client pays in each
round, whether it was drawn or not. Otherwise a client pays in full for the rounds in which it was
asked, and nothing in others.

Noise may be correlated over rounds, by a tree or by bands, see `fedsim.privacy.correlated_noise`.
This is accounted for where each client is asked once in a cycle of rounds, in the same order each
time. A tree spans a cycle and then begins anew, and no more bands are allowed than a cycle has
rounds, so that a client's rounds share no fresh noise. With bands of norm 1 each of its rounds
then costs what one with independent noise costs, and with a tree what one costs with 1 / sqrt(height)
of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.errors import ConfigError
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.correlated_noise import Correlation, Numbers, compute_noise_covariance, count_nodes
from fedsim.privacy.federation_privacy import SERVER, FederationPrivacy

CENTRAL_PRIVACY = "central_privacy"
"""Name of this mechanism in the ledger, as that of its table in the experiment file."""
_SHARE_OF_COUNT_NOISE = 1 / 20
"""Noise of the count of clipped updates, as a share of the clients of a round, by [Andrew2021]."""


@dataclass(frozen=True, kw_only=True)
class CentralPrivacy(FederationPrivacy):
    """Mechanism by which the server makes a model of its clients' updates.

    Attributes:
        clip: L2 norm to which each update is clipped; with `quantile`, in the first round.
        noise_multiplier: z, standard deviation of the noise of a sum, divided by the clip. With
            `quantile`, that of a single release that tells as much as the noisy sum and the noisy
            count together.
        expected: number of clients that a round is meant to have, by which sums are divided.
        cycle: number of rounds in which each client is asked once; None where clients are drawn.
        correlation: how noise is correlated over rounds; with a tree, `noise_multiplier` is that of
            each node.
        num_bands: how many rounds share fresh noise, where it is banded.
        quantile: share of the updates that are not to be clipped; None where the clip stays.
        clip_learning_rate: step size of the logarithm of the clip.
        count_noise: standard deviation of the noise of the count; None where nothing is counted.
    """

    name: ClassVar[str] = CENTRAL_PRIVACY
    trusted: ClassVar[str] = SERVER
    in_clear: ClassVar[str] = "to the server updates, N and metrics"
    clip: float
    noise_multiplier: float
    expected: float
    cycle: int | None = None
    correlation: Correlation = "independent"
    num_bands: int = 1
    quantile: float | None = None
    clip_learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError where the noise of the count tells too much, or two rounds of a client share noise."""
        if self.count_noise is not None and self.noise_multiplier >= 2 * self.count_noise:
            raise ConfigError(
                f"{self.name}.count_noise: the count under noise of {self.count_noise:g} alone reveals as much as a "
                f"sum with noise multiplier {2 * self.count_noise:.4g}, and both together must reveal no more than "
                f"one with {self.noise_multiplier:.4g}; set it above {self.noise_multiplier / 2:.4g}"
            )
        if self.correlation != "independent" and (self.cycle is None or self.num_bands > self.cycle):
            raise ConfigError(
                f"{self.name}.noise: with '{self.correlation}' two rounds of a client may share noise, which is not "
                "accounted for; have each client asked once in a cycle of rounds, as many as there are bands or more"
            )

    @property
    def sum_noise(self) -> float:
        """Return the noise multiplier of the sum, which is larger where a count is released too.

        References:
            [Andrew2021], Theorem 1: z^-2 = z_sum^-2 + (2 sigma_count)^-2, as the count of +-1/2 has
            sensitivity 1/2.
        """
        if self.count_noise is None:
            return self.noise_multiplier
        return 1 / math.sqrt(self.noise_multiplier**-2 - (2 * self.count_noise) ** -2)

    def mechanism(self, rounds: int = 1) -> Mechanism:
        """Return the mechanism of so many rounds of one client."""
        shared = count_shared_noise(self.correlation, self.cycle)
        return make_central_mechanism(self.noise_multiplier / math.sqrt(shared), self.rate, rounds)

    def compute_noise_covariance(self, rounds: int) -> Numbers:
        """Compute the covariance of the noise of the first rounds, `round round`, where that of fresh noise is 1."""
        return compute_noise_covariance(self.correlation, rounds, self.cycle or rounds, self.num_bands)

    def describe_strength(self) -> str:
        """Return clip and noise in a few words."""
        adapts = "" if self.quantile is None else f" in round 1, then towards quantile {self.quantile:g}"
        over_rounds = {
            "independent": "",
            "tree": f" at each node of a tree over {self.cycle} rounds",
            "banded": f", correlated by {self.num_bands} bands over rounds",
        }[self.correlation]
        return f"clip {self.clip:g}{adapts}, noise multiplier {self.noise_multiplier:.4g} of the server{over_rounds}"

    def describe(self) -> str:
        """Say in a sentence to whom what is promised, and what is not."""
        if self.cycle is not None:
            sampling = f"no amplification is claimed, because each client is asked once in {self.cycle} rounds"
            if self.correlation != "independent":
                sampling += ", in an order that stays, so that its rounds share no fresh noise"
        elif self.rate is None:
            sampling = "no amplification is claimed, because a round has a fixed number of clients"
        else:
            sampling = f"amplified by drawing each client with probability {self.rate:g}"
        return (
            "the unit is a client, whose updates are added or left out; it holds for those who see the models alone, "
            "other clients too, and trust the server, which sees each update, N and the metrics in clear; "
            f"{sampling}; privacy loss distributions of the Gaussian mechanism (dp-accounting)"
        )


def make_central_mechanism(noise: float, rate: float | None, rounds: int) -> Mechanism:
    """Return the Gaussian mechanism of clients, sampled where `rate` says so."""
    return Mechanism(scale=noise, releases=rounds, rate=1.0 if rate is None else rate, unit="client")


def count_shared_noise(correlation: Correlation, cycle: int | None) -> int:
    """Return in how many pieces of fresh noise, each of the full strength, a round of a client is seen."""
    return count_nodes(cycle) if correlation == "tree" and cycle is not None else 1


def choose_count_noise(quantile: float | None, wanted: float | None, expected: float) -> float | None:
    """Return the noise of the count: none without a quantile, by default a share of a round's clients."""
    if quantile is None:
        return None
    return expected * _SHARE_OF_COUNT_NOISE if wanted is None else wanted
