"""Tables that say what the server does not see of clients, or what the federation promises them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedsim.federation.table import Table

MIN_BITS, MAX_BITS = 4, 24
"""Fewest and most bits of the numbers that are summed under secure aggregation."""


class SecureAggregationTable(Table):
    """[secure_aggregation]: clients send masked updates; the server learns sums over groups alone.

    Without this table the server sees each client's update. See `strategies.secure_sum`.
    """

    groups: int | Literal["all"] = Field(
        default="all",
        description="Minimum number of clients in a group, 2 or more, drawn anew in each round; `all` is one group "
        "of all clients of the round.",
    )
    threshold: int | float = Field(
        default=0.5,
        description="Clients of a group that have to answer, or its sum is lost: a number of clients, or a fraction "
        "of the group, at least 2 clients; 1 is all of them, as in Flower.",
    )
    bits: int = Field(
        default=22,
        description=f"Bits per number, {MIN_BITS} to {MAX_BITS}: it is rounded stochastically to a multiple of "
        "2 `clip` / 2^`bits`.",
    )
    clip: float = Field(
        default=1.0,
        description="Each number of an update, times the weight of its client, is clipped to [-`clip`, `clip`]; "
        "above 0.",
    )

    @model_validator(mode="after")
    def _check_values(self) -> SecureAggregationTable:
        if self.groups != "all" and self.groups < 2:
            raise ValueError(
                f"groups: expected 2 clients or more, since the sum over one is its update, or 'all', got {self.groups}"
            )
        if not self.threshold > 0 or (isinstance(self.threshold, float) and self.threshold > 1):
            raise ValueError(
                "threshold: expected a number of clients from 1 on, or a fraction above 0 and at "
                f"most 1.0, got {self.threshold}"
            )
        if self.groups != "all" and self.threshold > self.groups:
            raise ValueError(
                f"threshold: {self.threshold} of a group have to answer, but groups = {self.groups}; lower it"
            )
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(
                f"bits: expected {MIN_BITS} to {MAX_BITS}, the numbers that float32 can distinguish, got {self.bits}"
            )
        if not self.clip > 0:
            raise ValueError(f"clip: expected a value above 0, in units of the update, got {self.clip}")
        return self

    def check_groups(self, clients: int, recorded: list[int] | None) -> None:
        """Raise ValueError where no round can have such groups, or `recorded` names single clients."""
        size = clients if self.groups == "all" else self.groups
        if size > clients or clients < 2:
            raise ValueError(
                f"secure_aggregation.groups: expected at most federation.clients = {clients}, and 2 "
                f"clients or more, got {self.groups}"
            )
        if self.threshold > size:
            raise ValueError(
                f"secure_aggregation.threshold: {self.threshold} of a group have to answer, but "
                f"federation.clients is {clients}; lower it"
            )
        if recorded is not None:
            raise ValueError(
                "recording.clients: under secure aggregation the server sees groups of clients, which "
                "are drawn anew in each round; leave it out"
            )

    def min_survivors(self, size: int) -> int:
        """Return how many of a group of `size` clients have to answer, by Flower's rule."""
        if isinstance(self.threshold, int) and self.threshold > 1:
            return self.threshold
        return max(round(self.threshold * size), 2)


class ClientPrivacyTable(Table):
    """Table of a mechanism that protects whole clients by noise of which the strength or the budget is set."""

    noise_multiplier: float | None = Field(default=None, gt=0)
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="Target epsilon of a client that takes part in all rounds, from which the noise follows.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="Probability bound, below 1 / `federation.clients`.")

    @model_validator(mode="after")
    def _check_noise(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("noise_multiplier: set it, or epsilon, from which it follows, and not both")
        return self


class CentralPrivacyTable(ClientPrivacyTable):
    """[central_privacy]: the server clips each client's update and adds noise to their sum.

    This promises (epsilon, delta)-differential privacy of each client to those who see the models
    alone. The server is trusted: it sees each update before. See `strategies.central_privacy`.
    """

    clip: float = Field(
        default=1.0, gt=0, description="L2 norm C to which each update is clipped, with `quantile` that of round 1."
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the sum, divided by the clip; with `quantile` that of a single "
        "release that tells as much as the sum and the count together.",
    )
    sampling: Literal["fixed", "poisson", "cyclic"] = Field(
        default="fixed",
        description="Whether a round has a fixed number of clients, for which no amplification is claimed; each client "
        "with probability `strategy.fraction_train`, independently (`poisson`), which amplifies; or a fixed number in "
        "turn, so that none is asked again before all others were (`cyclic`).",
    )
    noise: Literal["independent", "tree", "banded"] = Field(
        default="independent",
        description="Whether rounds have independent noise, or noise that cancels in part in the sum over rounds "
        "(`tree`, `banded`), which is accounted for without amplification, with `cyclic` sampling.",
    )
    bands: int | None = Field(
        default=None,
        ge=1,
        description="How many rounds share fresh noise where it is `banded`, at most the rounds in which each client "
        "is asked once, which is the default. The server keeps the noise of one round less.",
    )
    quantile: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of updates that are not to be clipped, to which the clip adapts; by default it stays.",
    )
    clip_learning_rate: float = Field(
        default=0.2, gt=0, le=10, description="Step size of the logarithm of the clip, see `quantile`."
    )
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the number of updates that were not clipped, see `quantile`; "
        "by default a twentieth of the clients of a round.",
    )

    @model_validator(mode="after")
    def _check_values(self) -> CentralPrivacyTable:
        if self.count_noise is not None and self.quantile is None:
            raise ValueError("count_noise: a fixed clip counts nothing; set quantile, or leave it out")
        if self.bands is not None and self.noise != "banded":
            raise ValueError(f"bands: noise = '{self.noise}' has none; leave it out, or set noise to 'banded'")
        if self.noise != "independent" and self.sampling != "cyclic":
            raise ValueError(
                f"noise: '{self.noise}' protects a client that adds to one of the rounds that share noise, which only "
                "sampling = 'cyclic' sees to; set that, or noise to 'independent'"
            )
        if self.noise != "independent" and self.quantile is not None:
            raise ValueError(
                f"quantile: noise = '{self.noise}' spans rounds, and requires a fixed clip; leave it out, or set "
                "noise to 'independent'"
            )
        return self


class DistributedPrivacyTable(ClientPrivacyTable):
    """[distributed_privacy]: each client adds a share of noise to what it sends for a sum.

    This promises (epsilon, delta)-differential privacy of each client to the server, which sees
    sums under `[secure_aggregation]` alone. See `fedsim.privacy.distributed`.
    """

    clip: float = Field(default=1.0, gt=0, description="L2 norm C to which each client clips its update.")
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the smallest sum that can be unmasked, divided by the largest "
        "length of a clipped and rounded update.",
    )


class CanariesTable(Table):
    """[canaries]: measure a lower bound of epsilon in this run, besides the proved guarantee.

    A coin decides for each canary whether it is included. Included canaries are gradients among
    those of the client's examples, so they change its message and cost accuracy; the N that it
    reports does not change. With `[central_privacy]` they are clients of their own, whose updates
    the server clips and adds to the others.
    """

    count: int = Field(ge=20, le=1_000_000, description="Number of canaries that are drawn for each of `clients`.")
    clients: list[int] | None = Field(
        default=None,
        description="Ids of the clients that carry canaries; by default the victims. None where canaries are "
        "clients themselves.",
    )
    confidence: float = Field(
        default=0.99, gt=0.5, lt=1, description="Probability with which all lower bounds of the run hold."
    )
