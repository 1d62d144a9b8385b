"""What a client is about to compute its message from in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from fedsim.task import Loss
from fedsim.training.sent import Sent
from fedsim.training.settings import LocalTraining

if TYPE_CHECKING:
    from fedsim.training.cohort import Share


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """What one client computes its message from in one round, before any of its defenses acts.

    Attributes:
        model: of the client's own, with the weights that it was sent, on the CPU.
        loss: of the task, before labels are smoothed.
        inputs: `example ...` in model units: all that it holds, or the mini-batch of which it sends the gradient.
        labels: `example`, class indices or targets.
        training: as the server asks for it.
        order: the examples of each local step; None of a single gradient.
        places: `example`, where these examples are among all that the client holds, ascending but for a mini-batch.
    """

    model: nn.Module
    loss: Loss
    inputs: Tensor
    labels: Tensor
    training: LocalTraining
    order: Sequence[Tensor] | None
    places: Tensor

    @classmethod
    def of(cls, model: nn.Module, share: Share, training: LocalTraining, loss: Loss) -> Self:
        """Of a client that holds `share`."""
        index, order = torch.arange(len(share.labels)), None
        if training.sends == "gradient":
            assert share.order is not None
            (index,) = share.order
        else:
            order = replace(share, hooks=None).drawn(training)
        return cls(
            model=model,
            loss=loss,
            inputs=share.inputs[index],
            labels=share.labels[index],
            training=training,
            order=order,
            places=index,
        )

    def sent(self, memory: int) -> Sent:
        """What it sends, as a function of its inputs; computing with it may take `memory` bytes at once.

        Raises:
            ConfigError: it is not measured, see `Sent.of`.
        """
        return Sent.of(
            self.model, self.loss, self.inputs, self.labels, training=self.training, order=self.order, budget=memory
        )
