"""Findings about how many examples a client has."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class ExampleCount(Finding):
    """N that the attack claims of the victim, the number of examples that it trained on.

    Attributes:
        count: N, at least 1.
        lowest: lower end of the range in which the attack itself expects N, at least 1.
        highest: its upper end; if both ends are `count`, the attack is certain.
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
