"""The finding of attacks on federated analytics: what one client answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import Finding


@dataclass(frozen=True, kw_only=True)
class AnsweredValues(Finding):
    """Claimed answers of one client to each question in each round, and which of them follow from the messages.

    Attributes:
        rounds: by question `round`, ascending.
        values: by question `round ...`, float64.
        standings: by question `round`: 2 for exactly what it sent, 1 if it holds unless values changed, 0 for a guess.
        spreads: by question `round ...`, the standard deviation that noise and rounding leave.
        people: by round and question, as `3/ages`, what one person added that joined before it, or had
            added that left.
        group: ids of a smallest group with it whose sum is determined; itself where it is determined, empty where
            none is known.
        group_sums: by question, the sum over that group in the last round, each weighted by N as in sums that the
            server saw; it holds if no person's values changed.
    """

    kind = "answers"
    rounds: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    standings: Mapping[str, Tensor]
    spreads: Mapping[str, Tensor]
    people: Mapping[str, Tensor] = field(default_factory=dict)
    group: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    group_sums: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.values.keys()
        if not names or not names == self.rounds.keys() == self.standings.keys() == self.spreads.keys():
            raise AttackError("the attack claims answers without rounds, standings or spreads, or none at all")
        for name, values in self.values.items():
            rounds, standings, spreads = self.rounds[name], self.standings[name], self.spreads[name]
            if values.dtype != torch.float64 or not values.isfinite().all() or not values.numel():
                raise AttackError(f"the attack claims answers to '{name}' that are not finite numbers in float64")
            if not len(rounds) == len(values) == len(standings) or spreads.shape != values.shape:
                raise AttackError(f"the attack claims answers to '{name}' in other rounds than it says")
            if not ((standings >= 0) & (standings <= 2)).all() or not (spreads >= 0).all():
                raise AttackError(f"the attack claims a standing of '{name}' beside 0, 1 and 2, or a negative spread")
        for key in self.people:
            number, _, name = key.partition("/")
            if name not in names or number not in map(str, self.rounds[name].tolist()[1:]):
                raise AttackError(
                    f"the attack claims a person of '{key}', expected a round after the first answer and its question"
                )
        super().__post_init__()

    @property
    def claim_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved for the claim, by name, without the trace."""
        tensors = {"group": self.group}
        for part, by_name in (
            ("rounds", self.rounds),
            ("values", self.values),
            ("standings", self.standings),
            ("spreads", self.spreads),
            ("people", self.people),
            ("group_sums", self.group_sums),
        ):
            tensors |= {f"{part}/{name}": tensor for name, tensor in by_name.items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """Make the finding from its `claim_tensors`."""

        def select(part: str) -> dict[str, Tensor]:
            start = f"{part}/"
            return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}

        return cls(
            rounds=select("rounds"),
            values=select("values"),
            standings=select("standings"),
            spreads=select("spreads"),
            people=select("people"),
            group=tensors["group"],
            group_sums=select("group_sums"),
            trace=trace,
        )
