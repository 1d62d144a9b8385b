"""How many values of a table's rows are right, beside what guessing gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim import table_metrics
from fedsim.evaluation.score import Public, Score
from fedsim.evaluation.truth import Truth


def columns_score(
    claimed: Tensor,
    truth: Truth,
    public: Public,
    guesses: Mapping[str, Tensor],
    clusters: Sequence[Tensor],
    rng: torch.Generator,
) -> Score:
    """`columns_right`: the share of values that are right, a number to `table_metrics.TOLERANCE` standard deviations.

    This is the accuracy of TabLeak (Vero et al., ICML 2023). Rows are assigned to the true ones so that it is largest,
    those of guesses as well. Besides `guesses` there are, from public rows, the likeliest value of each column, of
    a number that which is right for most of them, the same of clusters of public rows, and rows whose columns are drawn
    from public ones each by itself.

    Args:
        claimed: `row feature` in [0, 1].
        truth: says what the columns are, and how far numbers are spread.
        public: says what rows look like.
        guesses: further ones, rows by what they are called.
        clusters: for each claim, the places of public rows like which it might be.
        rng: draws rows.
    """
    columns, deviations = truth.columns, truth.deviations
    assert deviations is not None

    def each(rows: Tensor) -> Tensor:
        return table_metrics.columns_right(rows, truth.data, columns, deviations).double().mean(1)

    count = max(len(claimed), len(truth.data))
    modes = [likeliest(public.data[places], columns, deviations) for places in clusters]
    of_all = likeliest(public.data, columns, deviations)
    made = dict(guesses) | {
        "likeliest values of clusters": torch.stack(modes + [of_all] * (count - len(modes))),
        "likeliest values": of_all.expand(count, -1),
        "public columns": drawn(public.data, columns, count, rng),
    }
    found = each(claimed)
    return Score.beside(
        "columns_right",
        found.mean().item(),
        {name: each(rows).mean().item() for name, rows in made.items()},
        ceiling=1.0,
        per_image=tuple(found.tolist()),
    )


def likeliest(rows: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """`feature`: the most frequent category of each column, and the number that most of these rows have, about."""
    found = []
    for own, apart in zip(torch.split(rows, list(columns), 1), torch.split(deviations, list(columns)), strict=True):
        if own.shape[1] > 1:
            found.append(torch.eye(own.shape[1])[own.argmax(1).mode().values])
        else:
            found.append(_densest(own[:, 0], table_metrics.TOLERANCE * float(apart))[None])
    return torch.cat(found)


def _densest(numbers: Tensor, reach: float) -> Tensor:
    """The one of these `numbers` that has most of them within `reach`."""
    ordered = numbers.sort().values
    within = torch.searchsorted(ordered, ordered + reach, right=True) - torch.searchsorted(ordered, ordered - reach)
    return ordered[within.argmax()]


def drawn(rows: Tensor, columns: Sequence[int], count: int, rng: torch.Generator) -> Tensor:
    """`row feature`, `count` of them, each column taken from a row of its own."""
    parts = torch.split(rows, list(columns), 1)
    return torch.cat([own[torch.randint(len(rows), (count,), generator=rng)] for own in parts], 1)
