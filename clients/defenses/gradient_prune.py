"""The small numbers of each local gradient are set to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clients.defenses.views import smallest_sent, with_bounds
from fedsim.attacks import Paper
from fedsim.defense import Defense
from fedsim.errors import ConfigError
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class GradientPrune(Defense):
    """In each local step, set the smallest numbers of each tensor of the gradient to zero.

    A FedSGD client sends this gradient; of several steps the sum is sent, in which each number may have been kept in
    some of them. No formal guarantee: what is left is sent as it is.

    Args:
        pruned: share of the numbers of each tensor that is set to zero, smallest absolute values first, below 1; the
            count is rounded down. 0 leaves all, as without the defense.

    Raises:
        ConfigError: `pruned` is out of range.

    References:
        Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019 (Sec. 5.2: its attack fails above 20 %).
        Differs: the paper does not say whether the share is that of a tensor or of all; it is that of a tensor.
    """

    pruned: float = 0.3

    against: ClassVar[str] = "a server that inverts gradients without knowing that small numbers were set to zero"
    cost: ClassVar[str] = "accuracy, where much is pruned; no more bytes; a selection by size in each local step"
    paper: ClassVar[Paper] = Paper(
        title="Deep Leakage from Gradients",
        authors="Zhu, Liu, Han",
        venue="NeurIPS",
        year=2019,
        url="https://arxiv.org/abs/1906.08935",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.pruned < 1:
            raise ConfigError(f"pruned: expected a share of at least 0, below 1, got {self.pruned}")

    def on_gradient(self, gradient: State, *, rng: torch.Generator) -> State:
        """See Defense."""
        del rng
        return {name: without_smallest(tensor, self.pruned) for name, tensor in gradient.items()}

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. What was set to zero is at most as large as the smallest number of its tensor that was not.

        That is exact for one step. Of several, a number is zero that was set to zero in each, and others lack what was
        pruned in some steps, which is not known.
        """
        if not self.pruned:
            return gradient
        return with_bounds(gradient, sent, {name: smallest_sent(sent[name]) for name in gradient})


def without_smallest(tensor: Tensor, share: float) -> Tensor:
    """`tensor` with this share of its numbers, smallest absolute values first, at zero; itself where that is none."""
    flat = tensor.flatten()
    smallest = flat.abs().topk(int(share * flat.numel()), largest=False, sorted=False).indices
    return flat.index_fill(0, smallest, 0.0).view_as(tensor) if len(smallest) else tensor
