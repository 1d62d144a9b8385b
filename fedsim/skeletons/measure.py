"""Skeleton, a measure of exposure for fedsim.

Check it with `fedsim check fedsim.skeletons.measure:Skeleton`, and rank clients by it with `fedsim
expose skeleton.toml`. In `fedsim run skeleton.toml` each client computes it before it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import PositiveInt
from fedsim.base.randomness import generator
from fedsim.exposure.measure import Meaning, Measure
from fedsim.training.message_function import ClientMessage


@dataclass(frozen=True, kw_only=True)
class Skeleton(Measure):
    """Relative change of the message for a small change of the inputs, averaged over directions.

    `change` is the norm of the message's change divided by the norm of the message, for each model
    unit by which the inputs change. It is undefined for a batch whose gradient is zero.

    Args:
        directions: number of random directions.
    """

    # The fields are the settings. An experiment file sets them by the same names. Their types say
    # which values are accepted; `fedsim.base.constraints` has more of them.
    directions: PositiveInt = 20

    # The names of the values, and whether a larger value means that `more` or `less` is exposed.
    quantities: ClassVar[Mapping[str, Meaning]] = {"change": "more"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        # `sent` is the client's message as a function of its inputs: `sent.vector` is the gradient
        # or update as one vector, `sent.unknown_inputs` are the inputs that an attacker has to
        # find, `sent(inputs)` is the message for other inputs, and `sent.jacobian` the derivative.
        # Return NaN where a value is undefined, never 0.
        rng = generator("measure", "skeleton")  # the same draws each time, so that values can be compared
        directions = torch.randn((self.directions, sent.unknown_inputs.numel()), generator=rng)
        directions /= directions.norm(dim=1, keepdim=True)
        changes = torch.cat([sent.jacobian.push_forward(block) for block in sent.jacobian.split_directions(directions)])
        return {"change": changes.norm(dim=1).mean() / sent.vector.norm()}
