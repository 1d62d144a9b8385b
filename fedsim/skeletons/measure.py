"""Skeleton, a measure of exposure for fedsim.

`fedsim check fedsim.skeletons.measure:Skeleton` tries it, `fedsim expose skeleton.toml` says which clients are exposed
most, and in `fedsim run skeleton.toml` each client measures itself before it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import ConfigError
from fedsim.measure import Meaning, Measure
from fedsim.randomness import generator
from fedsim.training.sent import Sent


@dataclass(frozen=True, kw_only=True)
class Skeleton(Measure):
    """How much of what is sent changes where the inputs move a little, on average over random directions.

    `change` is in shares of what is sent for each model unit by which the inputs move. Of a batch whose gradient is
    zero it is undefined.

    Args:
        directions: how many random directions.
    """

    # The fields are the settings. An experiment file sets them by the same names, in values of these types.
    directions: int = 20

    # The values, and whether a larger one says that `more` or `less` is exposed.
    quantities: ClassVar[Mapping[str, Meaning]] = {"change": "more"}

    def __post_init__(self) -> None:
        if self.directions < 1:
            raise ConfigError(f"directions: expected at least 1, got {self.directions}")

    def _of(self, sent: Sent) -> Mapping[str, float | Tensor]:
        # `sent` is what the client sends, as a function of its inputs: `sent.vector` is the gradient or the update as
        # one vector, `sent.unknown` the inputs that an attacker has to find, `sent(inputs)` what others would give, and
        # `sent.linear` the derivative. Return NaN where a value is undefined, never 0.
        rng = generator("measure", "skeleton")  # draws the same each time, so that values can be compared
        directions = torch.randn((self.directions, sent.unknown.numel()), generator=rng)
        directions /= directions.norm(dim=1, keepdim=True)
        moved = torch.cat([sent.linear.push(block) for block in sent.linear.blocks(directions)])
        return {"change": moved.norm(dim=1).mean() / sent.vector.norm()}
