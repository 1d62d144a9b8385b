"""SPEAR: exact inputs from the zeros of ReLU, by sampling (Dimitrov, Baader, Müller, Vechev 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.attack import FirstLayerAttack
from adversaries.exact.consistency import odd, repaired
from adversaries.exact.layer import Layer
from adversaries.exact.mixture import Mixture
from adversaries.exact.silence import drawn
from fedsim.errors import AttackError, ConfigError

_AT_ONCE = 20_000


@dataclass(frozen=True, kw_only=True)
class Spear(FirstLayerAttack):
    """Draw N - 1 units at a time: if one example silences them all, they give its column of the mixture.

    The chance that a draw hits falls by about half with each further example, so batches stay small.

    Args:
        draws: at most; it stops when all columns are found.

    References:
        Dimitrov et al.: SPEAR, NeurIPS 2024, Algorithm 1. Differs: a column is taken or left by its zeros alone, see
        `Mixture.column`, so that no greedy choice among candidates is needed, and it is computed from all of its
        zeros again; it reads updates of several local steps as well.
    """

    draws: int = 2_000_000

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ConfigError(f"draws: expected at least 1, got {self.draws}")

    @property
    def turns(self) -> int:
        """See `FirstLayerAttack`."""
        return math.ceil(self.draws / _AT_ONCE)

    def _columns(
        self, mixture: Mixture, layer: Layer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        found: list[Tensor] = []
        among = torch.arange(len(mixture.rows))
        for start in range(0, self.draws, _AT_ONCE):
            for column in drawn(mixture, among, min(_AT_ONCE, self.draws - start), rng, most=mixture.rank):
                mixture.add(found, column)
            tell(len(found))
            if len(found) == mixture.rank:
                found = repaired(mixture, layer, found)
                if (worst := odd(mixture, layer, mixture.scaled(torch.stack(found, 1)))) is not None:
                    found.pop(worst)
            if len(found) == mixture.rank:
                return found, torch.empty((mixture.rank, 0), dtype=torch.float64)
        raise AttackError(
            f"{layer.scene.where}: {self.draws} draws gave {len(found)} of {mixture.rank} columns; "
            "raise draws, or choose 'spear-ica', which starts from estimates"
        )
