"""Columns of a mixture from the units that are silent for one example, estimated or sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adversaries.exact.mixture import InputMixture

_TRIMS = 3
_KEPT_SHARE = 0.8
_SILENT_SHARES = (1.0, 0.75, 0.5, 0.3)
_UNITS_PER_RANK = (1.3, 2.0, 3.0)
_REWEIGHTINGS, _FLOOR_FACTOR, _LEAST_FLOOR = 40, 0.7, 1e-9
_RIDGE = 1e-12
_MAX_TRIALS, _ZEROS_SHARE, _SAME_COSINE = 5, 0.65, 1 - 1e-6
_CHUNK_NUMBERS = 1 << 22
"""Numbers of the drawn rows that are computed at once."""


def fit_trimmed_column(mixture: InputMixture, silence: Tensor) -> Tensor | None:
    """Fit the column of an example with estimated silence, by least trimmed squares.

    The rows of its silent units map the column to zero. Some units that are estimated silent are
    not, mostly those that nearly fire: so fewer and surer ones are tried until a column is certain,
    and among them the rows that fit worst are left out.

    Args:
        silence: `unit`, how surely each unit of the mixture is silent for the example; above 0 if
            it is.

    Returns:
        `rank`; None if no column is certain.
    """
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    fewest = mixture.rank + 2
    for share in _SILENT_SHARES:
        rows = mixture.rows[order[: int(share * len(order))]]
        if len(rows) < fewest:
            break
        best_rows = rows
        for _ in range(_TRIMS):
            misfit = (rows @ _null_vector(best_rows.mT @ best_rows)).abs()
            count = max(fewest, int(_KEPT_SHARE * len(rows)))
            best_rows = rows[misfit.argsort()[:count]]
        column = mixture.refine_column(_null_vector(best_rows.mT @ best_rows))
        if column is not None:
            return column
    return None


def draw_guided_column(mixture: InputMixture, silence: Tensor, draws: int, rng: torch.Generator) -> Tensor | None:
    """Find an example's column by SPEAR's draws among the units that are most surely silent.

    For estimates that are too rough for `fit_trimmed_column`; see there.
    """
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    for units_per_rank in _UNITS_PER_RANK:
        units = order[: int(units_per_rank * mixture.rank) + 3]
        if len(units) < mixture.rank:
            break
        for column in draw_columns(mixture, units, draws, rng, most=1):
            return column
    return None


def follow_estimates(
    mixture: InputMixture, silence: Tensor, estimates: Tensor, known: Sequence[Tensor]
) -> list[Tensor]:
    """Find columns near estimates of them by least absolute values.

    A column is the q that minimises the sum of |U q| over the units that are estimated silent, of
    which some are not. The known columns make that sum small, too. So at first the part of an
    estimate that is not theirs is kept, and only what to add of them is optimised; from there on
    all of q is.

    Args:
        silence: `example unit`, see `fit_trimmed_column`; fewer and surer units are tried until a
            column is certain.
        estimates: `rank example`, orthogonal to the known columns.
        known: columns that are certain.
    """
    known_basis = estimates[:, :0]
    if known:
        known_basis = torch.linalg.qr(torch.stack(list(known), 1)).Q
    columns = []
    for example_silence, estimate in zip(silence, (estimates / estimates.norm(dim=0)).T, strict=True):
        if (column := _follow_estimate(mixture, example_silence, estimate, known_basis)) is not None:
            columns.append(column)
    return columns


def _follow_estimate(mixture: InputMixture, silence: Tensor, estimate: Tensor, known_basis: Tensor) -> Tensor | None:
    """Return the column near an estimate, `rank`; None if none is certain."""
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    for share in _SILENT_SHARES:
        rows = mixture.directions[order[: int(share * len(order))]]
        if len(rows) < mixture.rank + 2:
            break
        # Optimise the part of the known columns, then all.
        vector = estimate + known_basis @ _minimise_known_part(rows @ known_basis, rows @ estimate)
        floor: Tensor | None = None
        misfit = (rows @ vector).abs()
        weights = _weigh_inversely(misfit, misfit.median())
        for _ in range(_REWEIGHTINGS):
            vector = _null_vector((rows * weights[:, None]).T @ rows)
            misfit = (rows @ vector).abs()
            floor = _lower_floor(floor, misfit)
            weights = _weigh_inversely(misfit, floor)
        if (column := mixture.refine_column(vector)) is not None:
            return column
    return None


def _minimise_known_part(rows: Tensor, fixed: Tensor) -> Tensor:
    """Return `known`, the p that minimises the sum of |fixed + rows p|, by reweighted least squares."""
    ridge = _RIDGE * torch.eye(rows.shape[1], dtype=rows.dtype)
    weights = torch.ones_like(fixed)
    floor: Tensor | None = None
    for _ in range(_REWEIGHTINGS):
        weighted_rows = (rows * weights[:, None]).T
        part: Tensor = -torch.linalg.solve(weighted_rows @ rows + ridge, weighted_rows @ fixed)
        misfit = (fixed + rows @ part).abs()
        floor = _lower_floor(floor, misfit)
        weights = _weigh_inversely(misfit, floor)
    return part


def _lower_floor(floor: Tensor | None, misfit: Tensor) -> Tensor:
    """Return an ever smaller misfit that counts as none; at first the median."""
    return misfit.median() if floor is None else (floor * _FLOOR_FACTOR).clamp_min(_LEAST_FLOOR)


def _weigh_inversely(misfit: Tensor, floor: Tensor) -> Tensor:
    """Return `unit`, the weights at which squares are as absolute values; at most 1."""
    weights: Tensor = (misfit.square() + floor.square()).rsqrt()
    return weights / weights.max()


def draw_columns(mixture: InputMixture, units: Tensor, draws: int, rng: torch.Generator, most: int) -> list[Tensor]:
    """Find columns from random sets of rank - 1 units (SPEAR).

    The vector that the rows of a set map to zero is a column if one example silences all of them.

    Args:
        units: `candidate`, indices of units of the mixture, at least rank - 1.
        draws: number of sets.
        most: stop at this number of columns.
    """
    columns: list[Tensor] = []
    size = mixture.rank - 1
    chunk = max(1, _CHUNK_NUMBERS // (mixture.rank * max(mixture.rank, len(mixture.rows))))
    for start in range(0, draws, chunk):
        # Solve for the vectors that random sets map to zero, with a last entry of 1.
        count = min(chunk, draws - start)
        subsets = torch.rand(count, len(units), generator=rng).topk(size, dim=1).indices
        rows = mixture.directions[units[subsets]]
        solved = torch.linalg.solve_ex(rows[:, :, :-1], -rows[:, :, -1]).result
        guesses = torch.cat([solved, torch.ones(count, 1, dtype=solved.dtype)], 1)
        zeros = mixture.find_zeros(guesses.T).sum(0)
        guesses = guesses / guesses.norm(dim=1, keepdim=True)
        # Try those with most zeros.
        tried: list[Tensor] = []
        for index in zeros.argsort(descending=True).tolist():
            enough = max(mixture.rank + 2, _ZEROS_SHARE * int(zeros.max()))
            if zeros[index] < enough or len(tried) == _MAX_TRIALS + most or len(columns) == most:
                break
            guess = guesses[index]
            if any(float((guess @ other).abs()) > _SAME_COSINE for other in (*columns, *tried)):
                continue
            tried.append(guess)
            if (column := mixture.refine_column(guess)) is not None:
                mixture.add_column(columns, column)
        if len(columns) == most:
            break
    return columns


def _null_vector(gram: Tensor) -> Tensor:
    """Return the unit vector, `... rank`, that a Gram matrix `... rank rank` makes smallest."""
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[..., 0]
