"""Findings about how many examples a client has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class ExampleCount(Finding):
    """N that the attack claims of the victim, the number of examples that it trained on.

    Attributes:
        count: N, at least 1.
        lowest: lower end of the range in which the attack itself expects N, at least 1.
        highest: its upper end; where both ends are `count`, the attack is sure.
    """

    kind = "example-count"
    count: int
    lowest: int
    highest: int

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = (self.lowest, self.count, self.highest)
        if not all(type(number) is int for number in numbers) or not 1 <= self.lowest <= self.count <= self.highest:
            raise AttackError(
                f"the attack claims N of {self.count} in a range from {self.lowest} to {self.highest}, expected "
                "integers of at least 1 in ascending order"
            )

    @property
    def claim_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved for the claim, by name, without the trace."""
        return {name: torch.tensor(getattr(self, name)) for name in ("count", "lowest", "highest")}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """Make the finding from its `claim_tensors`."""
        numbers = {}
        for name in ("count", "lowest", "highest"):
            tensor = tensors[name]
            if tensor.ndim or tensor.dtype != torch.int64:
                raise AttackError(
                    f"the attack claims {name} of {tensor.dtype}, shape {tuple(tensor.shape)}, expected one integer"
                )
            numbers[name] = int(tensor)
        return cls(**numbers, trace=trace)
