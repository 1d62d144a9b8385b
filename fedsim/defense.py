"""The interface of a client-side defense: three hooks, each the identity by default.

`on_batch` and `on_gradient` act inside local training, `on_update` on what the client is about to
send. A defense that overrides only `on_update` also works in any other Flower app, as a mod
(`clients.mods.as_mod`).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.attack import Paper
from fedsim.messages import State


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What is proved: (epsilon, delta)-differential privacy of the weights that one client sends in a run.

    N and the metrics that a client reports beside them travel in the clear and are not covered.

    Attributes:
        epsilon: privacy loss, dimensionless.
        delta: probability bound, dimensionless.
        neighbours: which two inputs are made indistinguishable.
        accountant: how the rounds were composed.
    """

    epsilon: float
    delta: float
    neighbours: str
    accountant: str


@dataclass(frozen=True, kw_only=True)
class Defense(ABC):
    """Base of all defenses: a frozen dataclass whose fields are its strengths."""

    paper: ClassVar[Paper]

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Replace a mini-batch before its forward pass. `inputs` is `example ...` in model units."""
        del rng
        return inputs, labels

    def on_gradient(self, gradient: State, *, rng: torch.Generator) -> State:
        """Replace the mean gradient of a mini-batch before the optimizer's step."""
        del rng
        return gradient

    def on_update(self, update: State, *, rng: torch.Generator) -> State:
        """Replace the update w_T - w_t, or the gradient that a FedSGD client sends in its place, before it is sent."""
        del rng
        return update

    def guarantee(self, rounds: int, delta: float) -> Guarantee | None:
        """What is proved after `rounds` updates of one client, or None where nothing is."""
        del rounds, delta
        return None
