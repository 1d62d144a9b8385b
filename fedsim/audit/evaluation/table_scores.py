"""Score how many values of claimed table rows are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import table_metrics
from fedsim.interfaces.metric import EXPLANATION_OF_GUESSES, Metric
from fedsim.interfaces.modality import PublicExamples


class ColumnsRight(Metric):
    """Share of the values of claimed rows that are right."""

    title = "columns right"
    higher_is_better = True
    is_share = True
    of_examples = True
    ranks_examples = True
    preference = 50
    explanations = (
        EXPLANATION_OF_GUESSES,
        "Of the values of a row, the right category counts, or a number within 0.319 standard deviations; rows are "
        "assigned so that as many as possible are right, for guesses too.",
    )


def score_columns(
    claimed: Tensor,
    truth: Truth,
    public: PublicExamples,
    guesses: Mapping[str, Tensor],
    clusters: Mapping[str, Sequence[Tensor]],
    rng: torch.Generator,
) -> Score:
    """Score `columns_right`, the share of values that are right, against guesses.

    A number is right to `table_metrics.TOLERANCE` standard deviations. This is the accuracy of
    TabLeak [Vero2023]. Rows are assigned to the true ones so that it is largest, those of guesses
    as well. Besides `guesses` there are guesses from public rows: the likeliest value of each
    column (of a number the value that is right for most rows), the same for clusters of public
    rows, and rows whose columns are drawn independently from public ones.

    Args:
        truth: says what the columns are, and the standard deviations of numbers.
        guesses: further ones, rows by name.
        clusters: for each claim, the indices of public rows that it may be like, in ways by name.
    """
    columns, deviations = truth.columns, truth.deviations
    assert deviations is not None

    def shares_right(rows: Tensor) -> Tensor:
        right = table_metrics.find_correct_columns(rows, truth.data, columns, deviations)
        return right.double().mean(1)

    count = max(len(claimed), len(truth.data))
    of_all = likeliest_row(public.data, columns, deviations)
    all_guesses = dict(guesses)
    for name, clusters_of_name in clusters.items():
        rows = [likeliest_row(public.data[indices], columns, deviations) for indices in clusters_of_name]
        all_guesses[f"likeliest values of {name}"] = torch.stack(rows + [of_all] * (count - len(rows)))
    all_guesses |= {
        "likeliest values": of_all.expand(count, -1),
        "random values by column": draw_rows(public.data, columns, count, rng),
    }
    shares = shares_right(claimed)
    return Score.against_guesses(
        "columns_right",
        shares.mean().item(),
        {name: shares_right(guess).mean().item() for name, guess in all_guesses.items()},
        per_image=tuple(shares.tolist()),
    )


def likeliest_row(rows: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """Return the likeliest row, `feature`.

    It has the most frequent category of each column, and about the number that most rows have.
    """
    parts = []
    column_rows = torch.split(rows, list(columns), 1)
    column_deviations = torch.split(deviations, list(columns))
    for values, deviation in zip(column_rows, column_deviations, strict=True):
        width = values.shape[1]
        if width > 1:
            parts.append(torch.eye(width)[values.argmax(1).mode().values])
        else:
            reach = table_metrics.TOLERANCE * float(deviation)
            parts.append(_densest(values[:, 0], reach)[None])
    return torch.cat(parts)


def _densest(numbers: Tensor, reach: float) -> Tensor:
    """Return the one of these `numbers` that has most of them within `reach`."""
    ordered = numbers.sort().values
    last = torch.searchsorted(ordered, ordered + reach, right=True)
    first = torch.searchsorted(ordered, ordered - reach)
    return ordered[(last - first).argmax()]


def draw_rows(rows: Tensor, columns: Sequence[int], count: int, rng: torch.Generator) -> Tensor:
    """Draw `count` rows, `row feature`, each column from a row of its own."""
    parts = []
    for column in torch.split(rows, list(columns), 1):
        indices = torch.randint(len(rows), (count,), generator=rng)
        parts.append(column[indices])
    return torch.cat(parts, 1)
