"""The length of what a client sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.measure import Meaning, Measure
from fedsim.training.sent import Sent


@dataclass(frozen=True, kw_only=True)
class GradientNorm(Measure):
    """L2 norm of the gradient of a batch's mean loss, all trained parameters together; of an update, (w_0 - w_T) / lr.

    `norm` is in units of the loss over those of the weights. Geiping et al. 2020 and Yin et al. 2021 take a larger one
    for more exposure; LAVP finds that it often says nothing. Of each example of a batch it is the norm of that
    example's share of the gradient. A norm of exactly 0 is undefined, for there is nothing to read.
    """

    quantities: ClassVar[Mapping[str, Meaning]] = {"norm": "more"}
    black_box: ClassVar[bool] = True

    def _of(self, sent: Sent) -> Mapping[str, Tensor | float]:
        norm = sent.share.double().norm()
        return {"norm": norm if norm else math.nan}
