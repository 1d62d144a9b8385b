"""SPEAR: exact inputs from the zeros of ReLU, by sampling [Dimitrov2024]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.attack import FirstLayerAttack
from adversaries.exact.consistency import find_sum_column, repair_columns
from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.silence import draw_columns
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError

_DRAWS_A_STEP = 20_000


@dataclass(frozen=True, kw_only=True)
class Spear(FirstLayerAttack):
    """Draw N - 1 units at a time: if one example silences them all, they give its column of the mixture.

    1. Draw sets of units, and keep the columns whose zeros certify them (`draw_columns`).
    2. Stop when all N are found, none of which is a sum of several (`find_sum_column`).

    The chance that a draw hits falls by about half with each further example, so batches stay
    small.

    Args:
        draws: at most; it stops when all columns are found.

    References:
        [Dimitrov2024], Algorithm 1. Differs: a column is accepted by its zeros alone, see
        `InputMixture.refine_column`, so that no greedy choice among candidates is needed, and it is
        computed from all of its zeros again; it reads updates of several local steps as well.
    """

    draws: PositiveInt = 2_000_000

    @property
    def progress_steps(self) -> int:
        """Return the largest number of progress reports."""
        return math.ceil(self.draws / _DRAWS_A_STEP)

    def _columns(
        self, mixture: InputMixture, layer: FirstLayer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        columns: list[Tensor] = []
        all_units = torch.arange(len(mixture.rows))
        for start in range(0, self.draws, _DRAWS_A_STEP):
            # Draw, and add the columns that are new.
            draws = min(_DRAWS_A_STEP, self.draws - start)
            for column in draw_columns(mixture, all_units, draws, rng, most=mixture.rank):
                mixture.add_column(columns, column)
            tell(len(columns))
            # Drop a column that is a sum, and stop if there is none.
            if len(columns) == mixture.rank:
                columns = repair_columns(mixture, layer, columns)
                sum_column = find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(columns, 1)))
                if sum_column is None:
                    return columns, torch.empty((mixture.rank, 0), dtype=torch.float64)
                columns.pop(sum_column)
        raise AttackError(
            f"{layer.problem.where}: {self.draws} draws gave {len(columns)} of {mixture.rank} "
            "columns; raise draws, or choose 'spear-ica', which starts from estimates"
        )
