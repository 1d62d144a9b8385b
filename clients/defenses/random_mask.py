"""Random masking: a random part of the update is not sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from clients.defenses.error_feedback import add_unsent, keep_unsent
from clients.defenses.views import find_random_mask
from fedsim.base.constraints import ShareBelowOne
from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, omission_deviations
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class RandomMask(Defense):
    """Leave each number of the update out with one probability, independently of the others.

    Each client draws a new mask in each round, or all clients share one. No formal guarantee: the
    numbers sent are exact, up to one known factor.

    Args:
        masked: probability that a number is left out, below 1; 0 sends all, as without the defense.
        rescale: whether sent numbers are divided by 1 - `masked`, so that the update is unbiased;
            otherwise its norm shrinks the more of it is left out.
        error_feedback: whether numbers that a client did not send are added to its next update.
        common: whether all clients of a round leave out the same numbers, as secure aggregation
            needs. The server can know them.

    Raises:
        ConfigError: `masked` is out of range, or `rescale` goes together with `error_feedback`.

    References:
        [Konecny2016], Sec. 2, random mask.
        Differs: the indices are sent with the numbers, where the paper's client sends the seed of
        its mask; `rescale` is off, as in TGIAs-RO's masking of gradients.
    """

    masked: ShareBelowOne = 0.4
    rescale: bool = False
    error_feedback: bool = False
    common: bool = False

    against: ClassVar[str] = (
        "a server that inverts the update and takes zeros for zeros; many rounds show it all numbers"
    )
    cost: ClassVar[str] = "accuracy or rounds, less with error feedback; saves bytes where less than half is sent"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = cite("Konecny2016")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescale and self.error_feedback:
            raise ConfigError(
                "rescale: what is left out is sent in later rounds under error_feedback, so nothing is to be made up "
                "for; set one of them to false"
            )

    @property
    def draws_in_common(self) -> bool:
        """Return whether all clients of a round leave out the same numbers."""
        return self.common

    def on_update(self, update: State, context: LocalContext) -> State | Payload:
        """Return the numbers of the update that the mask leaves."""
        if not self.masked:
            return update
        intended = add_unsent(update, context.memory)
        sent, source = {}, context.common_rng if self.common else context.rng
        for name, tensor in intended.items():
            is_sent = torch.rand(tensor.shape, generator=source) >= self.masked
            sent[name] = torch.where(is_sent, tensor, torch.zeros_like(tensor))
        if self.error_feedback:
            keep_unsent(context.memory, intended, sent)
        factor = 1 / (1 - self.masked) if self.rescale else 1.0
        return Payload.from_sparse({name: tensor * factor for name, tensor in sent.items()})

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient masked and rescaled as the update was.

        With `error_feedback`, an update contains an unknown remainder of earlier rounds, which the
        view ignores as noise. See `find_random_mask` for how zeros are attributed to the mask.
        """
        if not self.masked:
            return gradient
        factor = 1 / (1 - self.masked) if self.rescale else 1.0
        return {
            name: tensor * (factor * ~find_random_mask(sent[name], self.masked)) for name, tensor in gradient.items()
        }

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Return which numbers the mask left out; None with `error_feedback`."""
        del facts
        if self.error_feedback:
            return None
        deviations = {}
        for name, tensor in sent.items():
            if self.masked:
                deviations[name] = omission_deviations(find_random_mask(tensor, self.masked))
        return MessageNoise(deviations=deviations)
