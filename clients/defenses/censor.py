"""CENSOR: in early rounds, a random direction orthogonal to the gradient takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class Censor(Defense):
    """Replace the gradient by the best of several random directions that are orthogonal to it.

    1. For each tensor of the gradient, draw a random direction that is orthogonal to it, and give it
       the norm of that tensor. All tensors together are a candidate; `trials` of them are drawn.
    2. Of the candidates, take the one whose step at `trial_rate` leaves the smallest loss of the
       batch.
    3. Do so in each local step of the first `rounds` rounds. In later rounds, the gradient is used
       as it is.

    A message tells the norm of each tensor of the gradient, and one direction that is orthogonal to
    it. Several messages about nearly the same gradient, as of a client that takes one step with all
    its examples in each round, tell more: as many as a tensor has numbers determine it up to its
    sign. So the gradient of the last bias, and with it the labels, does not stay hidden. To first
    order, no candidate changes the loss, so the model learns next to nothing in these rounds. A
    tensor of one number has no orthogonal direction, so zero takes its place. No formal guarantee.

    Args:
        trials: number of candidates in each local step, at least 1.
        rounds: number of first rounds in which gradients are replaced; 0 replaces them in all.
        trial_rate: learning rate of the step by which candidates are compared.

    Raises:
        ConfigError: a setting is out of range.

    References:
        [Zhang2025]. The defaults are those of its released code, which replaces gradients in the
        first ten epochs alone.
        Differs: that code keeps the gradient itself where no candidate has a smaller loss than the
        current weights, which would reveal it; here the best candidate is sent all the same. Its
        candidates are compared with dropout and BatchNorm in evaluation mode, here in that of
        training.
    """

    trials: PositiveInt = 20
    rounds: NonNegativeInt = 10
    trial_rate: PositiveFloat = 1e-4

    against: ClassVar[str] = (
        "a server that inverts gradients of early rounds; in later rounds the gradient is sent as it is, in early "
        "ones the norms of its tensors are, and several of these reveal small tensors, as the last bias"
    )
    cost: ClassVar[str] = (
        "next to nothing is learnt in the rounds with replaced gradients; a forward pass for each candidate and step"
    )
    paper: ClassVar[Paper] = cite("Zhang2025")

    def acts_in(self, number: int) -> bool:
        """Return whether gradients are replaced in a round, counted from 1."""
        return not self.rounds or number <= self.rounds

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        """Return the orthogonal direction with the smallest loss, in later rounds the gradient."""
        if not self.acts_in(context.round):
            return gradient
        weights = context.weights

        def loss_after_step(candidate: State) -> float:
            return context.loss_at({name: weights[name] - self.trial_rate * candidate[name] for name in candidate})

        candidates = (
            {name: _draw_orthogonal(tensor, context.rng) for name, tensor in gradient.items()}
            for _ in range(self.trials)
        )
        return min(candidates, key=loss_after_step)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return what was sent, with the norms that the tensors of `gradient` have.

        So an attack looks for data whose gradient has these norms, as one message tells hardly more.
        """
        return {name: _scale_to_norm(sent[name], tensor) for name, tensor in gradient.items()}


def _draw_orthogonal(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a random direction orthogonal to `tensor`, with its norm; zero for a single number."""
    if tensor.numel() == 1:
        return torch.zeros_like(tensor)
    direction = torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype).to(tensor.device)
    squared_norm = tensor.square().sum()
    if squared_norm > 0:
        direction = direction - (direction * tensor).sum() / squared_norm * tensor
    return _scale_to_norm(direction, tensor)


def _scale_to_norm(direction: Tensor, tensor: Tensor) -> Tensor:
    """Return `direction` with the norm of `tensor`."""
    norm = direction.norm()
    return direction * (tensor.norm() / norm) if norm > 0 else torch.zeros_like(direction)
