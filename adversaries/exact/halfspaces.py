"""Columns of a mixture from the halfspaces of weights in which units fire for an example."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture, approach_null_vector

_LARGEST_REWARD, _STEEPNESS = 0.6, 2.0
"""Reward of units on the boundary at the end of a search; how fast rewards saturate."""
_QUICK_SEARCH, _LONG_SEARCH, _QUICK_SEARCHES = (0.5, 12, 75), (2.0, 50, 150), 4
"""Starts for each input that is not found yet, and others, and steps; number of quick searches. The long one comes
where these lead to no column. Of few starts less end at the same column, and each column that is found makes the next
search easier."""
_SAME_COSINE = 0.97
_MAX_FAILURES = 25
"""Number of ends of the search in a row that lead to no column, after which the rest is left out."""
_SILENT_SHARES = (0.9, 0.7, 0.5)
_KEPT_SHARES = (0.6, 0.7, 0.7, 0.8, 0.8)
"""Shares of the units, the surest to be silent; and of these, the ones that fit best, in turn."""


def add_halfspace_columns(
    mixture: InputMixture, layer: FirstLayer, columns: list[Tensor], effort: int, rng: torch.Generator
) -> None:
    """Search columns from random starts, by the weights of the units, and add them to `columns`.

    1. Search directions q whose gradients |U q| lie on one side of a hyperplane (`_search`).
    2. Compute columns from their zeros, the sparsest first (`_fit_column`).

    Args:
        columns: that are certain.
        effort: multiple of the steps of a search, at least 1.
    """
    num_known = len(columns)
    for _ in range(_QUICK_SEARCHES):
        count = len(columns)
        _search_columns(mixture, layer, columns, _QUICK_SEARCH, effort, rng)
        if len(columns) in (count, mixture.rank):
            break
    if len(columns) == num_known:
        _search_columns(mixture, layer, columns, _LONG_SEARCH, effort, rng)


def _search_columns(
    mixture: InputMixture,
    layer: FirstLayer,
    columns: list[Tensor],
    search: tuple[float, int, int],
    effort: int,
    rng: torch.Generator,
) -> None:
    starts_per_input, spare_starts, steps = search
    remaining = mixture.remaining_directions(columns)
    weights = _project_weights(mixture, layer, remaining)
    starts = int(starts_per_input * remaining.shape[1]) + spare_starts
    guesses, silence = _search(mixture, weights, starts, effort * steps, rng)
    _add_sparsest_columns(mixture, guesses, silence, columns)


def _add_sparsest_columns(mixture: InputMixture, guesses: Tensor, silence: Tensor, columns: list[Tensor]) -> None:
    """Compute columns from guesses, the sparsest first, until too many in a row give none; add them to `columns`."""
    tried = torch.stack(columns) if columns else guesses.new_zeros((0, mixture.rank))
    failures = 0
    absolute_sums = (mixture.rows @ guesses).abs().sum(0)
    for index in absolute_sums.argsort().tolist():
        guess = guesses[:, index]
        if (tried @ guess).abs().gt(_SAME_COSINE).any():
            continue
        tried = torch.cat([tried, guess[None]])
        column = _fit_column(mixture, silence[index], guess)
        failures = 0 if column is not None and mixture.add_column(columns, column) else failures + 1
        if len(columns) == mixture.rank or failures == _MAX_FAILURES:
            break


def _project_weights(mixture: InputMixture, layer: FirstLayer, remaining: Tensor) -> Tensor:
    """Return `unit rest`, the units' mean weights over the round, in the span of the inputs not yet found.

    Args:
        remaining: `rank rest`, see `InputMixture.remaining_directions`.
    """
    span = torch.linalg.svd(remaining.T @ mixture.inputs, full_matrices=False).Vh
    weight = torch.stack([weight for weight, _ in layer.endpoints]).mean(0)
    projected: Tensor = weight[mixture.unit_indices] @ span.T
    return projected


def _search(
    mixture: InputMixture, weights: Tensor, starts: int, steps: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Search directions whose gradients lie in a halfspace of the weights, from random starts.

    Unit i fires for an example x where w_i x > 0, so for the example's column q the gradients |U q|
    are zero for the units on one side of a hyperplane in the space of weights, which is known. For
    any other direction many examples take part, and their hyperplanes blur. So in turn

    - the hyperplane is fitted to |U q| by least squares;
    - q takes a step towards more gradient on its one side and less on the other.

    Args:
        weights: `unit rest`, see `_project_weights`.

    Returns:
        Directions, `rank start`, of norm 1, and `start unit`, how far each unit is on the silent
        side.
    """
    rows = mixture.rows.float()
    basis = torch.linalg.qr((weights - weights.mean(0)).float()).Q
    directions = torch.randn(mixture.rank, starts, generator=rng)
    for step in range(steps):
        # Fit the hyperplane.
        gradients = rows @ (directions / directions.norm(dim=0))
        sides = basis @ (basis.T @ gradients.abs())
        # Reward gradients on its one side; at first also punish those near it.
        rewards = torch.tanh(_STEEPNESS * sides / sides.std(0)) + _LARGEST_REWARD * step / steps
        directions = rows.T @ (gradients.sign() * rewards)
    directions = directions / directions.norm(dim=0)
    sides = basis @ (basis.T @ (rows @ directions).abs())
    return directions.double(), -sides.T.double()


def _fit_column(mixture: InputMixture, silence: Tensor, guess: Tensor) -> Tensor | None:
    """Return the column near a guess, `rank`, from its silent units; None if none is certain.

    As `fit_trimmed_column`, but the first units that are left out are those that fit the guess
    worst.

    Args:
        silence: `unit`, how far each is on the silent side; above 0 if it is.
        guess: `rank`.
    """
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    fewest = mixture.rank + 2
    for share in _SILENT_SHARES:
        rows = mixture.directions[order[: int(share * len(order))]]
        if len(rows) < fewest:
            break
        column = guess
        for kept_share in _KEPT_SHARES:
            count = max(fewest, int(kept_share * len(rows)))
            best_rows = rows[(rows @ column).abs().argsort()[:count]]
            column = approach_null_vector(best_rows, column)
            if (certain := mixture.refine_column(column)) is not None:
                return certain
    return None
