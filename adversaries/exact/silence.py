"""Columns of a mixture from units that are silent for one example: by sampling, or by an estimate of who is silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adversaries.exact.mixture import Mixture

_TRIMS = 3
_KEPT = 0.8
_SHARES = (1.0, 0.75, 0.5, 0.3)
_AMONG = (1.3, 2.0, 3.0)
_TURNS, _SHARPER, _SHARPEST = 40, 0.7, 1e-9
_RIDGE = 1e-12
_TRIED, _AS_MANY, _SAME = 5, 0.65, 1 - 1e-6
_ONCE = 1 << 22
"""Numbers of the drawn rows that are worked on at once."""


def trimmed(mixture: Mixture, silence: Tensor) -> Tensor | None:
    """The column of an example of which an estimate is known, by least trimmed squares.

    The rows of its silent units map the column to zero. Some units that are thought silent are not, mostly those that
    nearly fire: so fewer and surer ones are tried until a column is certain, and among them the rows that fit worst
    are left out.

    Args:
        silence: `unit`, of each unit of the mixture how surely it is silent for the example; above 0 where it is.
    """
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    fewest = mixture.rank + 2
    for share in _SHARES:
        rows = mixture.rows[order[: int(share * len(order))]]
        if len(rows) < fewest:
            break
        kept = rows
        for _ in range(_TRIMS):
            misfit = (rows @ _null(kept.mT @ kept)).abs()
            kept = rows[misfit.argsort()[: max(fewest, int(_KEPT * len(rows)))]]
        if (column := mixture.column(_null(kept.mT @ kept))) is not None:
            return column
    return None


def guided(mixture: Mixture, silence: Tensor, draws: int, rng: torch.Generator) -> Tensor | None:
    """Likewise by SPEAR's draws among the units that are most surely silent, for estimates that are further off."""
    order = silence.argsort(descending=True)[: int((silence > 0).sum())]
    for times in _AMONG:
        among = order[: int(times * mixture.rank) + 3]
        if len(among) < mixture.rank:
            break
        for column in drawn(mixture, among, draws, rng, most=1):
            return column
    return None


def followed(mixture: Mixture, silence: Tensor, estimates: Tensor, found: Sequence[Tensor]) -> list[Tensor]:
    """Columns by least absolute values from estimates of them, all examples at once.

    A column is the q that makes the sum of |U q| smallest over the units that are thought silent, of which some are
    not. The columns that were found make that sum small, too. So at first the part of an estimate that is not theirs
    stays, and only what to add of them is sought; from there on all of q is.

    Args:
        silence: `example unit`, see `trimmed`; fewer and surer units are tried until a column is certain.
        estimates: `rank example`, orthogonal to the columns that were found.
        found: columns.
    """
    rows, columns = mixture.directions, list[Tensor]()
    known = torch.linalg.qr(torch.stack(list(found), 1)).Q if found else estimates[:, :0]
    guesses = (estimates / estimates.norm(dim=0)).T
    for share in _SHARES:
        thought = _surest(silence, share)
        enough = thought.sum(1) >= mixture.rank + 2
        thought, silence, guesses = thought[enough], silence[enough], guesses[enough]
        if not len(guesses):
            break
        near = guesses + _least_absolute(rows @ known, guesses @ rows.T, thought) @ known.T
        certain = [mixture.column(column) for column in _smallest_absolute(rows, near, thought)]
        columns += [column for column in certain if column is not None]
        left = torch.tensor([column is None for column in certain])
        silence, guesses = silence[left], guesses[left]
    return columns


def _surest(silence: Tensor, share: float) -> Tensor:
    """`example unit`, 1 at a share of the units that are thought silent, those that are surely so, else 0."""
    most = (share * (silence > 0).sum(1)).long()
    places = silence.argsort(dim=1, descending=True).argsort(dim=1)
    return (places < most[:, None]).double()


def _least_absolute(rows: Tensor, fixed: Tensor, thought: Tensor) -> Tensor:
    """`example known`: the p with the smallest sum of |fixed + rows p|, over the units that are thought silent."""
    ridge = _RIDGE * torch.eye(rows.shape[1], dtype=rows.dtype)

    def solved(weights: Tensor) -> Tensor:
        gram = torch.einsum("eu,ui,uj->eij", weights, rows, rows) + ridge
        parts: Tensor = torch.linalg.solve(gram, (weights * fixed) @ rows)
        return -parts

    return _reweighted(solved, lambda parts: fixed + parts @ rows.T, thought, thought)


def _smallest_absolute(rows: Tensor, guesses: Tensor, thought: Tensor) -> Tensor:
    """`example rank`: near each guess the unit vector q with the smallest sum of |rows q|, likewise."""

    def solved(weights: Tensor) -> Tensor:
        return _null(torch.einsum("eu,ui,uj->eij", weights, rows, rows))

    misfit = (guesses @ rows.T).abs()
    weights = _weights(misfit, thought, _typical(misfit, thought))
    return _reweighted(solved, lambda vectors: vectors @ rows.T, thought, weights)


def _reweighted(
    solved: Callable[[Tensor], Tensor], misfit: Callable[[Tensor], Tensor], thought: Tensor, weights: Tensor
) -> Tensor:
    """Least absolute values by least squares whose weights are those of the last solution, ever sharper."""
    floor = None
    for _ in range(_TURNS):
        solution = solved(weights)
        off = misfit(solution).abs()
        floor = _typical(off, thought) if floor is None else (floor * _SHARPER).clamp_min(_SHARPEST)
        weights = _weights(off, thought, floor)
    return solution


def _weights(misfit: Tensor, thought: Tensor, floor: Tensor) -> Tensor:
    """`example unit`, at most 1."""
    weights = thought / (misfit.square() + floor.square()).sqrt()
    largest: Tensor = weights.amax(1, keepdim=True)
    return weights / largest


def _typical(misfit: Tensor, thought: Tensor) -> Tensor:
    """`example 1`: the median over the units that are thought silent."""
    return misfit.where(thought > 0, torch.nan).nanmedian(1, keepdim=True).values


def drawn(mixture: Mixture, among: Tensor, draws: int, rng: torch.Generator, most: int) -> list[Tensor]:
    """Columns from random sets of rank - 1 units: what they all map to zero is a column if one example silences all.

    Args:
        among: `candidate`, indices of units of the mixture, at least rank - 1.
        draws: number of sets.
        most: stop at so many columns.
    """
    found: list[Tensor] = []
    size = mixture.rank - 1
    at_once = max(1, _ONCE // (mixture.rank * max(mixture.rank, len(mixture.rows))))
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        chosen = torch.rand(count, len(among), generator=rng).topk(size, dim=1).indices
        taken = mixture.directions[among[chosen]]
        solved = torch.linalg.solve_ex(taken[:, :, :-1], -taken[:, :, -1]).result
        guesses = torch.cat([solved, torch.ones(count, 1, dtype=solved.dtype)], 1)
        zeros = mixture.zeros(guesses.T).sum(0)
        guesses = guesses / guesses.norm(dim=1, keepdim=True)
        tried: list[Tensor] = []
        for index in zeros.argsort(descending=True).tolist():
            enough = max(mixture.rank + 2, _AS_MANY * int(zeros.max()))
            if zeros[index] < enough or len(tried) == _TRIED + most or len(found) == most:
                break
            if any(float((guesses[index] @ other).abs()) > _SAME for other in (*found, *tried)):
                continue
            tried.append(guesses[index])
            if (column := mixture.column(guesses[index])) is not None:
                mixture.add(found, column)
        if len(found) == most:
            break
    return found


def _null(gram: Tensor) -> Tensor:
    """The unit vector, `... rank`, that a Gram matrix `... rank rank` makes smallest."""
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[..., 0]
