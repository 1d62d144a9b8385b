"""Ditto: beside the shared model each client has one of its own, which does not stray far from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.base.constraints import PositiveFloat
from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.interfaces.local_context import Memory
from fedsim.recording.payloads import State


@dataclass(frozen=True, kw_only=True)
class Ditto(ClientAlgorithm):
    """Train the shared model as FedAvg does, and a personal one with lambda / 2 |v - w_t|^2.

    The personal model never leaves, and nothing that is sent follows from it, so that defenses do
    not act on its training.

    Args:
        weight: lambda, of the proximal term; 0.0 would train each client alone.

    References:
        [Li2021b], Algorithm 1.
    """

    weight: PositiveFloat = 0.1

    personal: ClassVar[bool] = True
    keeps: ClassVar[str] = "a personal model"
    sends: ClassVar[str] = "the shared model as it trained it"
    paper: ClassVar[Paper] = cite("Li2021b")

    def train_client(self, client: LocalClient) -> ClientResult:
        """Train the shared model, and then the personal one."""
        shared = client.train(client.model)
        start = self.personalise_model(client.model, client.memory)
        personal = client.train(start, name="personal", proximal_mu=self.weight, anchor=client.model, defended=False)
        client.memory.update(personal)
        return ClientResult(model=shared)

    def personalise_model(self, model: State, memory: Memory) -> State:
        """Return the personal model, in the first round the shared one."""
        return {**model, **memory}
