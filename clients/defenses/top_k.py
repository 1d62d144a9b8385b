"""Only the largest numbers of the update are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from clients.defenses.error_feedback import keep_unsent, with_unsent
from fedsim.attacks import Paper
from fedsim.defense import Defense, Memory, Setting
from fedsim.errors import ConfigError
from fedsim.wire.messages import State
from fedsim.wire.payloads import Payload


@dataclass(frozen=True, kw_only=True)
class TopK(Defense):
    """Send the k numbers of the update that are largest by absolute value, with their places; the rest is zero.

    The whole update, all layers together, is one list of numbers. BatchNorm's running statistics are among them where
    clients share those. No formal guarantee: what is sent is sent as it is.

    Args:
        fraction: share of the numbers that is sent, above 0; 1 sends all, as without the defense. k is this share of
            all numbers, rounded, and at least 1.
        k: count of the numbers that are sent, instead of `fraction`; 0 leaves it to `fraction`.
        error_feedback: whether what a client did not send is added to its update in the next round.

    Raises:
        ConfigError: a setting is out of range, or the model has fewer than `k` numbers.

    References:
        Aji and Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017 (with error feedback).
        Differs: it acts on the update of a round, which for FedSGD is the gradient.
    """

    fraction: float = 0.1
    k: int = 0
    error_feedback: bool = False

    against: ClassVar[str] = (
        "a server that inverts the update and takes zeros for zeros; the largest numbers it sees as they are"
    )
    cost: ClassVar[str] = "accuracy or rounds, less with error feedback; saves bytes where less than half is sent"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = Paper(
        title="Sparse Communication for Distributed Gradient Descent",
        authors="Aji, Heafield",
        venue="EMNLP",
        year=2017,
        url="https://arxiv.org/abs/1704.05021",
    )

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction: expected a share above 0, at most 1, got {self.fraction}")
        if self.k < 0:
            raise ConfigError(f"k: expected a count of at least 1, or 0 to leave it to fraction, got {self.k}")

    def check(self, setting: Setting) -> None:
        """See Defense."""
        count = sum(tensor.numel() for tensor in setting.update.values())
        if self.k > count:
            raise ConfigError(f"k: {self.k} numbers are to be sent, but an update has {count}; choose at most as many")

    def on_update(  # type: ignore[override]
        self, update: State, *, rng: torch.Generator, memory: Memory
    ) -> State | Payload:
        """See Defense. Of numbers of the same size that would make more than k, some are sent."""
        del rng
        count = sum(tensor.numel() for tensor in update.values())
        k = min(self.k, count) or max(1, round(self.fraction * count))
        if k == count:
            return update
        wanted = with_unsent(update, memory)
        sizes = torch.cat([tensor.reshape(-1).abs().double() for tensor in wanted.values()])
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[sizes.topk(k, sorted=False).indices] = True
        masks = torch.split(chosen, [tensor.numel() for tensor in wanted.values()])
        sent = {
            name: torch.where(mask.view_as(tensor), tensor, torch.zeros_like(tensor))
            for (name, tensor), mask in zip(wanted.items(), masks, strict=True)
        }
        if self.error_feedback:
            keep_unsent(memory, wanted, sent)
        return Payload.sparse(sent)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. What was not sent counts half: it may be anything below the smallest number that was.

        Half is between taking it for zero, which most of it is nearly, and leaving it out: attacks found more by it
        than by either, or by the bound. With `error_feedback` numbers carry what earlier rounds left over, which is not
        known; then the gradient is seen as it is.
        """
        if self.error_feedback:
            return gradient
        return {name: torch.where(sent[name] != 0, tensor, tensor / 2) for name, tensor in gradient.items()}
