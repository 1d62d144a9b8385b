"""Find columns of a mixture near estimates of them, which are independent components of what is left."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.components import ComponentSource, separate_components
from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.silence import draw_guided_column, fit_trimmed_column, follow_estimates

_GUIDED_DRAWS, _DRAWS_FACTOR, _MAX_GUIDED_DRAWS = 150, 6, 10_000
"""Draws of sets of units for each example, their factor after each pass without a new column, and
their number for all examples."""


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
