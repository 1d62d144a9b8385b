"""Principal components of messages, of the numbers that differ most between clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_NUMBERS = 32_768
"""Numbers of a message that are kept."""
_LEAST_VARIANCE = 1e-6
"""Least variance of a principal component, as a share of the largest; less is an error of float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageProjection:
    """Principal components of messages.

    Attributes:
        kept: positions of the numbers that are kept.
        mean: `kept`, of all messages.
        basis: `kept component`, of norm 1, the one with the largest variance first.
    """

    kept: Tensor
    mean: Tensor
    basis: Tensor

    @classmethod
    def fit(cls, kept: Tensor, messages: Tensor, count: int) -> MessageProjection:
        """Fit components to messages, of which there are fewer than numbers.

        Args:
            kept: positions of the numbers.
            messages: `message kept`.
            count: of components at most.
        """
        mean = messages.mean(0)
        centred = messages - mean
        variances, vectors = torch.linalg.eigh((centred @ centred.T).double().cpu())
        variances, vectors = variances.flip(0)[:count], vectors.flip(1)[:, :count]
        enough = variances > _LEAST_VARIANCE * variances[0]
        scaled = (vectors[:, enough] / variances[enough].sqrt()).to(messages)
        return cls(kept=kept, mean=mean, basis=centred.T @ scaled)

    def project(self, messages: Tensor) -> Tensor:
        """Return `message component` for `message kept`."""
        return (messages - self.mean) @ self.basis


def choose_numbers(clean: Tensor, defended: Tensor) -> Tensor:
    """Return the positions of the numbers that differ most between clients, and that defenses let through.

    >>> choose_numbers(torch.tensor([[0.0, 1, 5], [0, 2, 7]]), torch.tensor([[1.0, 1, 0], [2, 2, 0]]))
    tensor([1])

    Args:
        clean: `message number`, without defenses.
        defended: `message number`.
    """
    variances = clean.var(0)
    variances = torch.where(defended.var(0) > 0, variances, 0.0)
    count = min(_MOST_NUMBERS, int((variances > 0).sum()))
    return variances.topk(count).indices.sort().values
