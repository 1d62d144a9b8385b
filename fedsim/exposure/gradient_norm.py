"""The norm of a client's message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage


@dataclass(frozen=True, kw_only=True)
class GradientNorm(Measure):
    """L2 norm of the gradient of a batch's mean loss, or of an update (w_0 - w_T) / lr.

    `norm` is over all trained parameters together, in units of the loss over those of the weights.
    [Geiping2020] and [Yin2021] take a larger one for more exposure; LAVP finds that it often says
    nothing. For one example of a batch it is the norm of that example's share of the gradient. A
    norm of exactly 0 is undefined, because the message then carries nothing.
    """

    quantities: ClassVar[Mapping[str, Meaning]] = {"norm": "more"}
    black_box: ClassVar[bool] = True

    def _compute(self, sent: ClientMessage) -> Mapping[str, Tensor | float]:
        norm = sent.gradient_share.double().norm()
        return {"norm": norm if norm else math.nan}
