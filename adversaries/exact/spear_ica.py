"""SPEAR for many examples and local steps: estimates as the start, then the zeros of ReLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.attack import FirstLayerAttack
from adversaries.exact.components import ComponentSource, separate_components
from adversaries.exact.consistency import find_sum_column, repair_columns
from adversaries.exact.halfspaces import add_halfspace_columns
from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.silence import draw_columns, draw_guided_column, fit_trimmed_column, follow_estimates
from fedsim.base.constraints import NonNegativeInt, PositiveInt

_SLOW_COMPONENTS, _UNITS_PER_EXAMPLE = 32, 6
"""Halfspaces come first above this number of inputs, for which components take long, if there are
at least so many units for each."""
_GUIDED_DRAWS, _DRAWS_FACTOR, _MAX_GUIDED_DRAWS = 150, 6, 10_000
"""Draws of sets of units for each example, their factor after each pass without a new column, and
their number for all examples."""


@dataclass(frozen=True, kw_only=True)
class SpearIca(FirstLayerAttack):
    """Find columns of the mixture from estimates of the inputs, take their inputs away, and go on with the rest.

    A pass either

    1. separates what is left of the update into independent components, which are rough estimates
       of the inputs that are not found yet (`estimate_columns`);
    2. estimates which units are silent for each example, at w_0 and at w_T;
    3. computes columns from the zeros of these units, without those that do not fit (`add_estimated_columns`);

    or it searches columns whose zeros lie in a halfspace of the units' weights, from random starts
    (`add_halfspace_columns`). What found columns last comes next. A column counts only if its zeros
    determine it, and the next pass has fewer inputs to tell apart. A few may still be sums of
    several examples that leave nearly the same units silent, as images of like brightness do; once
    all columns are found, sums are taken apart (`repair_columns`) or dropped. If passes find nothing, units are
    drawn blindly, as in SPEAR; inputs whose columns were not found remain estimates.

    Args:
        passes: at most.
        patience: passes without a new column after which the rest remains estimates.
        draws: blind draws of sets of units, in all.

    References:
        [Dimitrov2024] (SPEAR), for the zeros; [Kariyappa2023], for independent components. Differs:
        both are for one step, this reads local steps; the components are those of differences,
        silence comes from estimates, inputs are taken away as they are found, and some are
        certified. For large batches SPEAR++ (arXiv 2510.24200) learns a sparse dictionary, which
        does not use that the zeros lie in halfspaces of known weights.
    """

    passes: PositiveInt = 40
    patience: PositiveInt = 8
    draws: NonNegativeInt = 20_000

    @property
    def progress_steps(self) -> int:
        """Return the largest number of progress reports."""
        return self.passes

    def _columns(
        self, mixture: InputMixture, layer: FirstLayer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        columns: list[Tensor] = []
        complete: list[Tensor] = []
        stalled_passes = 0
        drew_blindly = self.draws == 0
        has_enough_units = len(mixture.rows) >= _UNITS_PER_EXAMPLE * mixture.rank
        by_halfspaces = has_enough_units and mixture.rank > _SLOW_COMPONENTS
        for _ in range(self.passes):
            count_before = len(columns)
            # Each source has had its turn after two passes without a new column.
            attempt = stalled_passes // 2
            if by_halfspaces:
                add_halfspace_columns(mixture, layer, columns, 1 + attempt, rng)
            else:
                add_estimated_columns(mixture, layer, columns, attempt, rng)
            is_stalled = len(columns) == count_before
            by_halfspaces ^= is_stalled
            # Draw units blindly once, before giving up.
            if is_stalled and stalled_passes == self.patience - 1 and not drew_blindly:
                drew_blindly = True
                all_units = torch.arange(len(mixture.rows))
                for column in draw_columns(mixture, all_units, self.draws, rng, most=mixture.rank):
                    mixture.add_column(columns, column)
            # Drop a column that is a sum, and stop if there is none.
            if len(columns) == mixture.rank:
                columns = complete = repair_columns(mixture, layer, columns)
                sum_column = find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(columns, 1)))
                if sum_column is None:
                    break
                columns = columns[:sum_column] + columns[sum_column + 1 :]
            stalled_passes = stalled_passes + 1 if len(columns) <= count_before else 0
            tell(len(columns))
            if stalled_passes == self.patience:
                break
        if complete:
            return complete, torch.empty((mixture.rank, 0), dtype=torch.float64)
        return columns, estimate_columns(mixture, layer, mixture.remaining_directions(columns), 0)


def add_estimated_columns(
    mixture: InputMixture, layer: FirstLayer, columns: list[Tensor], attempt: int, rng: torch.Generator
) -> None:
    """Estimate the remaining columns, search near the estimates, and add what is certain to `columns`."""
    remaining = mixture.remaining_directions(columns)
    estimates = estimate_columns(mixture, layer, remaining, attempt)
    silence = _estimate_silence(mixture, layer, estimates)
    draws = min(_GUIDED_DRAWS * _DRAWS_FACTOR**attempt, _MAX_GUIDED_DRAWS // remaining.shape[1])
    _search_columns(mixture, silence, estimates, columns, draws, rng)


def estimate_columns(mixture: InputMixture, layer: FirstLayer, remaining: Tensor, attempt: int) -> Tensor:
    """Estimate columns, `rank rest`, in the span of `remaining`, by independent components.

    Args:
        remaining: `rank rest`, see `InputMixture.remaining_directions`.
        attempt: number of earlier ones since the last new column. Each makes other estimates
            than the last one.
    """
    source: ComponentSource = "values"
    if len(layer.shape) == 3 and attempt % 2 == 0:
        source = "differences"
    mixtures = remaining.T @ mixture.inputs
    return remaining @ separate_components(mixtures, layer.shape, source, attempt)


def _search_columns(
    mixture: InputMixture,
    silence: Tensor,
    estimates: Tensor,
    columns: list[Tensor],
    draws: int,
    rng: torch.Generator,
) -> None:
    """Search columns near estimates and add them to `columns`.

    Args:
        silence: `example unit`, estimated.
        estimates: `rank example`, of the columns.
        columns: that are certain.
        draws: of sets of units for each example.
    """
    known = list(columns)
    is_open = torch.ones(len(silence), dtype=torch.bool)
    for example, units in enumerate(silence):
        if (column := fit_trimmed_column(mixture, units)) is not None:
            mixture.add_column(columns, column)
            is_open[example] = False
    for column in follow_estimates(mixture, silence[is_open], estimates[:, is_open], known):
        mixture.add_column(columns, column)
    if len(columns) == len(known):
        for units in silence:
            if (column := draw_guided_column(mixture, units, draws, rng)) is not None:
                mixture.add_column(columns, column)


def _estimate_silence(mixture: InputMixture, layer: FirstLayer, estimates: Tensor) -> Tensor:
    """Return `example unit`, see `FirstLayer.silence`, for the inputs that estimates stand for.

    Args:
        estimates: `rank rest`, of columns.
    """
    basis, mixed = torch.linalg.qr(estimates)
    bias_coordinates = basis.T @ mixture.bias_coordinates
    scales = torch.linalg.solve(mixed, bias_coordinates)
    inputs = torch.linalg.solve(mixed * scales, basis.T @ mixture.inputs)
    return layer.silence(layer.clamp_inputs(inputs))[:, mixture.unit_indices]
