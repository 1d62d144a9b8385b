"""Skeleton, a client algorithm for fedsim.

Check it with `fedsim check fedsim.skeletons.algorithm:Skeleton`, and let clients train by it with
`fedsim run skeleton.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import NonNegativeFloat
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.interfaces.attack import Paper


@dataclass(frozen=True, kw_only=True)
class Skeleton(ClientAlgorithm):
    """Pull each client towards its own last model as well as it can be pulled by a quadratic term.

    Args:
        weight: of the quadratic term; 0 is FedAvg.

    References:
        Authors: Title, Venue, Year, Algorithm. Differs: say where you depart from it, and why.
    """

    # The fields are the settings. An experiment file sets them by the same names. Their types say
    # which values are accepted; `fedsim.base.constraints` has more of them.
    weight: NonNegativeFloat = 0.1

    # Other facts: `strategies` that it goes with, `private_parts` that never leave the client (with
    # `divide_model`), `personal` where a client uses a model of its own (with `personalise_model`).
    keeps: ClassVar[str] = "its last model"
    sends: ClassVar[str] = "the whole model"
    # What the report cites.
    paper: ClassVar[Paper] = Paper(title="Skeleton", authors="Nobody yet", venue="unpublished", year=2026)

    # `client.model` is the whole model at the start of the round, `client.memory` what the client
    # keeps, and `client.train` takes local steps with the batches, optimizer and defenses of the
    # experiment. A second pass needs a name: `client.train(start, name="personal")`.
    def train_client(self, client: LocalClient) -> ClientResult:
        """Train one client in one round."""
        last = {**client.model, **client.memory}  # in its first round it keeps nothing
        after = client.train(client.model, proximal_mu=self.weight, anchor=last)
        client.memory.update(after)
        return ClientResult(model=after)
