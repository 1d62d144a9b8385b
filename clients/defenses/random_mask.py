"""A random part of the update is not sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from clients.defenses.error_feedback import keep_unsent, with_unsent
from clients.defenses.views import by_chance
from fedsim.attacks import Paper
from fedsim.defense import Defense, Memory
from fedsim.errors import ConfigError
from fedsim.wire.messages import State
from fedsim.wire.payloads import Payload


@dataclass(frozen=True, kw_only=True)
class RandomMask(Defense):
    """Leave each number of the update out with one probability, independently of the others; the rest is sent.

    Each client draws a new mask in each round, or all draw the same one. No formal guarantee: what is sent is sent as
    it is, or times one known factor.

    Args:
        masked: probability of each number to be left out, below 1; 0 sends all, as without the defense.
        rescale: whether what is sent is divided by 1 - `masked`, so that the update is right on average. Without, the
            update is the shorter the more of it is left out.
        error_feedback: whether what a client did not send is added to its update in the next round.
        common: whether all clients of a round leave out the same numbers, as secure aggregation needs it. The server
            can know them.

    Raises:
        ConfigError: `masked` is out of range, or `rescale` goes together with `error_feedback`.

    References:
        Konecny et al.: Federated Learning: Strategies for Improving Communication Efficiency, 2016 (Sec. 2, random
        mask).
        Differs: the places are sent beside the numbers, where the paper's client sends the seed of its mask; `rescale`
        is off, as in TGIAs-RO's masking of gradients.
    """

    masked: float = 0.4
    rescale: bool = False
    error_feedback: bool = False
    common: bool = False

    against: ClassVar[str] = (
        "a server that inverts the update and takes zeros for zeros; many rounds show it all numbers"
    )
    cost: ClassVar[str] = "accuracy or rounds, less with error feedback; saves bytes where less than half is sent"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = Paper(
        title="Federated Learning: Strategies for Improving Communication Efficiency",
        authors="Konecny, McMahan, Yu, Richtarik, Suresh, Bacon",
        venue="arXiv",
        year=2016,
        url="https://arxiv.org/abs/1610.05492",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.masked < 1:
            raise ConfigError(f"masked: expected a probability of at least 0, below 1, got {self.masked}")
        if self.rescale and self.error_feedback:
            raise ConfigError(
                "rescale: what is left out is sent in later rounds under error_feedback, so nothing is to be made up "
                "for; set one of them to false"
            )

    def on_update(  # type: ignore[override]
        self, update: State, *, rng: torch.Generator, memory: Memory, common: torch.Generator | None = None
    ) -> State | Payload:
        """See Defense."""
        if not self.masked:
            return update
        wanted = with_unsent(update, memory)
        sent, source = {}, common or rng
        for name, tensor in wanted.items():
            kept = torch.rand(tensor.shape, generator=source) >= self.masked
            sent[name] = torch.where(kept, tensor, torch.zeros_like(tensor))
        if self.error_feedback:
            keep_unsent(memory, wanted, sent)
        factor = 1 / (1 - self.masked) if self.rescale else 1.0
        return Payload.sparse({name: tensor * factor for name, tensor in sent.items()})

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. Numbers that the mask left out count for nothing, see `by_chance`; `rescale` is undone.

        With `error_feedback` an update carries what earlier ones left over; that of one round does not tell it apart,
        and it counts as noise.
        """
        if not self.masked:
            return gradient
        factor = 1 / (1 - self.masked) if self.rescale else 1.0
        return {name: tensor * (factor * ~by_chance(sent[name], self.masked)) for name, tensor in gradient.items()}
