"""Top-k sparsification: only the largest numbers of the update are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from clients.defenses.error_feedback import add_unsent, keep_unsent
from clients.defenses.views import bounds_of_unsent, smallest_magnitude
from fedsim.base.constraints import NonNegativeInt, PositiveShare
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Setting
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class TopK(Defense):
    """Send the k numbers of the update with the largest absolute values, and their indices.

    The numbers are selected from the update as a whole, not by layer; it includes BatchNorm's
    running statistics where clients share those. No formal guarantee: the numbers sent are exact.

    Args:
        fraction: share of the numbers that is sent, above 0; 1 sends all, as without the defense. k
            is this share of all numbers, rounded, and at least 1.
        k: count of the numbers that are sent, instead of `fraction`; 0 leaves it to `fraction`.
        error_feedback: whether what a client did not send is added to its update in the next round.

    Raises:
        ConfigError: a setting is out of range, or the model has fewer than `k` numbers.

    References:
        [Aji2017] (with error feedback).
        Differs: it acts on the update of a round, which for FedSGD is the gradient.
    """

    fraction: PositiveShare = 0.1
    k: NonNegativeInt = 0
    error_feedback: bool = False

    against: ClassVar[str] = (
        "a server that inverts the update and takes zeros for zeros; the largest numbers it sees as they are"
    )
    cost: ClassVar[str] = "accuracy or rounds, less with error feedback; saves bytes where less than half is sent"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = cite("Aji2017")

    def check(self, setting: Setting) -> None:
        """Check that the update has at least k numbers."""
        count = sum(tensor.numel() for tensor in setting.update.values())
        if self.k > count:
            raise ConfigError(f"k: {self.k} numbers are to be sent, but an update has {count}; choose at most as many")

    def on_update(self, update: State, context: LocalContext) -> State | Payload:
        """Return the k largest numbers of the update; ties are broken arbitrarily."""
        count = sum(tensor.numel() for tensor in update.values())
        k = min(self.k, count) or max(1, round(self.fraction * count))
        if k == count:
            return update
        intended = add_unsent(update, context.memory)
        magnitudes = torch.cat([tensor.reshape(-1).abs().double() for tensor in intended.values()])
        is_sent = torch.zeros(count, dtype=torch.bool)
        is_sent[magnitudes.topk(k, sorted=False).indices] = True
        masks = torch.split(is_sent, [tensor.numel() for tensor in intended.values()])
        sent: dict[str, torch.Tensor] = {}
        for (name, tensor), mask in zip(intended.items(), masks, strict=True):
            sent[name] = torch.where(mask.view_as(tensor), tensor, torch.zeros_like(tensor))
        if self.error_feedback:
            keep_unsent(context.memory, intended, sent)
        return Payload.from_sparse(sent)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient with numbers that were not sent halved.

        An unsent number is anything below the smallest number sent, mostly nearly zero. Attacks
        reconstruct more when it counts half than when it counts as zero, is ignored, or is bounded.
        With `error_feedback`, numbers contain an unknown remainder of earlier rounds; then the
        gradient is returned unchanged.
        """
        if self.error_feedback:
            return gradient
        return {name: torch.where(sent[name] != 0, tensor, tensor / 2) for name, tensor in gradient.items()}

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return the bound of unsent numbers, the smallest number sent; None with `error_feedback`."""
        del facts
        if self.error_feedback:
            return None
        # The numbers are selected from the update as a whole.
        bound = smallest_magnitude(torch.cat([tensor.flatten() for tensor in sent.values()]))
        bounds = bounds_of_unsent(sent, dict.fromkeys(sent, bound))
        return MessageNoise(bounds=bounds, around_view=False)
