"""The data, model and settings from which a client computes its message in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from fedsim.base.task import Loss
from fedsim.training.message_function import ClientMessage
from fedsim.training.settings import LocalTraining

if TYPE_CHECKING:
    from fedsim.training.cohort import LocalData


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """Data, model and settings of one client in one round, before any of its defenses acts.

    Attributes:
        model: the client's own copy, with the weights of the broadcast, on the CPU.
        loss: of the task, before labels are smoothed.
        inputs: `example ...` in model units: all local data, or the mini-batch whose gradient is
            sent.
        labels: `example`, class indices or targets.
        training: settings as the server sent them.
        order: indices of the examples of each local step; None where a single gradient is sent.
        indices: `example`, indices of these examples in the client's data, ascending except for a
            mini-batch.
    """

    model: nn.Module
    loss: Loss
    inputs: Tensor
    labels: Tensor
    training: LocalTraining
    order: Sequence[Tensor] | None
    indices: Tensor

    @classmethod
    def create(cls, model: nn.Module, share: LocalData, training: LocalTraining, loss: Loss) -> Self:
        """Create the round of a client with the data `share`."""
        index, order = torch.arange(len(share.labels)), None
        if training.sends == "gradient":
            assert share.order is not None
            (index,) = share.order
        else:
            order = replace(share, hooks=None).draw_batches(training)
        return cls(
            model=model,
            loss=loss,
            inputs=share.inputs[index],
            labels=share.labels[index],
            training=training,
            order=order,
            indices=index,
        )

    def client_message(self, memory: int) -> ClientMessage:
        """Return the client's message as a function of its inputs.

        Args:
            memory: bytes that computing with it may take at once.

        Raises:
            ConfigError: the message cannot be measured, see `ClientMessage.create`.
        """
        return ClientMessage.create(
            self.model,
            self.loss,
            self.inputs,
            self.labels,
            training=self.training,
            order=self.order,
            budget=memory,
        )
