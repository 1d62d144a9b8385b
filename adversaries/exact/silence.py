"""Columns of a mixture from units that are silent for one example: by sampling, or by an estimate of who is silent."""

from __future__ import annotations

import torch
from torch import Tensor

from adversaries.exact.mixture import Mixture

_TRIMS = 3
_KEPT = 0.8
_SHARES = (1.0, 0.75, 0.5, 0.3)
_AMONG = (1.3, 2.0, 3.0)
_DOUBT = 0.02
_TURNS, _SHARPER, _SHARPEST = 30, 0.7, 1e-9
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


def reweighted(mixture: Mixture, silence: Tensor) -> list[Tensor]:
    """Columns by least absolute values, for estimates that are further off: all examples at once.

    Minimises the sum of |U q| over the units of which it is thought that they are silent, and a little over the others,
    by least squares whose weights are those of the last solution, ever sharper.

    Args:
        silence: `example unit`, see `trimmed`.
    """
    rows, thought = mixture.directions, (silence > 0).double()
    start = thought + _DOUBT
    weights, floor = start, torch.zeros(0)
    for turn in range(_TURNS):
        guesses = _null(torch.einsum("eu,ui,uj->eij", weights, rows, rows))
        misfit = (guesses @ rows.mT).abs()
        if not turn:
            floor = torch.stack(
                [
                    one[sure > 0].median() if sure.any() else one.new_ones(())
                    for one, sure in zip(misfit, thought, strict=True)
                ]
            )
        weights = start / (misfit.square() + floor[:, None].square())
        weights = weights / weights.amax(1, keepdim=True)
        floor = (floor * _SHARPER).clamp_min(_SHARPEST)
    return [column for guess in guesses if (column := mixture.column(guess)) is not None]


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
