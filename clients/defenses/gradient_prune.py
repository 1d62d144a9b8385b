"""Gradient pruning: the smallest numbers of each local gradient become zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from clients.defenses.views import bounds_of_unsent, shrink_unsent, smallest_magnitude
from fedsim.base.constraints import ShareBelowOne
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class GradientPrune(Defense):
    """Set the smallest numbers of each tensor of the gradient to zero, in each local step.

    A FedSGD client sends this gradient. After several steps their sum is sent, in which a number is
    zero only if it was pruned in each. No formal guarantee: numbers that are not pruned are sent
    exactly.

    Args:
        pruned: share of the numbers of each tensor that is set to zero, smallest absolute values
            first, below 1; the count is rounded down. 0 leaves all, as without the defense.

    Raises:
        ConfigError: `pruned` is out of range.

    References:
        [Zhu2019] (Sec. 5.2: its attack fails above 20 %).
        Differs: the paper does not say whether the share is that of a tensor or of all; here it is
        that of a tensor.
    """

    pruned: ShareBelowOne = 0.3

    against: ClassVar[str] = "a server that inverts gradients without knowing that small numbers were set to zero"
    cost: ClassVar[str] = "accuracy, where much is pruned; no more bytes; a selection by size in each local step"
    paper: ClassVar[Paper] = cite("Zhu2019")

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        """Return the gradient with the smallest numbers of each tensor set to zero."""
        return {name: zero_smallest(tensor, self.pruned) for name, tensor in gradient.items()}

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient with unsent numbers halved up to their tensor's smallest sent one.

        The bound is exact for one step. After several steps, numbers that were pruned in some steps
        lack an unknown part, which the view ignores.
        """
        if not self.pruned:
            return gradient
        return shrink_unsent(gradient, sent, {name: smallest_magnitude(sent[name]) for name in gradient})

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return the bound of numbers sent as zero; None where the number of steps is withheld.

        In each step, a number that was pruned is at most about as large as the smallest sent number
        of its tensor. A number that was sent may have been pruned in all steps but one.
        """
        if not self.pruned:
            return MessageNoise()
        if facts.steps is None:
            return None
        limits, deviations = {}, {}
        for name, tensor in sent.items():
            smallest = smallest_magnitude(tensor)
            limits[name] = facts.steps * smallest
            pruned = torch.where(smallest.isfinite(), smallest, 0.0) * math.sqrt((facts.steps - 1) / 3)
            deviations[name] = torch.where(tensor != 0, pruned, 0.0)
        return MessageNoise(deviations=deviations, bounds=bounds_of_unsent(sent, limits), around_view=False)


def zero_smallest(tensor: Tensor, share: float) -> Tensor:
    """Return `tensor` with this share of its numbers, smallest absolute values first, set to zero.

    Where the share is less than one number, `tensor` itself is returned.

    >>> import torch
    >>> zero_smallest(torch.tensor([3.0, -1.0, 2.0, 4.0]), 0.5)
    tensor([3., 0., 0., 4.])
    """
    flat = tensor.flatten()
    smallest = flat.abs().topk(int(share * flat.numel()), largest=False, sorted=False).indices
    return flat.index_fill(0, smallest, 0.0).view_as(tensor) if len(smallest) else tensor
