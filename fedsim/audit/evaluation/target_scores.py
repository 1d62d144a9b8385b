"""Score claimed targets that are several labels or numbers an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsim.audit.evaluation.score import Score
from fedsim.base.task import Goal
from fedsim.interfaces.metric import Metric
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities.diverse_guesses import centres_of_claims

_DRAWS = 20
"""Random guesses whose mean counts, so that a lucky one is no floor."""
_FLOORS = (
    "Claimed targets are assigned to the true ones as is best for them, and so are the guesses beside them: random "
    "rows, the row that is best for all examples, rows of public examples, and as many centres of these as there are "
    "claims."
)


class LabelsRight(Metric):
    """Share of an example's several labels that are claimed rightly, after the best assignment."""

    title = "labels right"
    higher_is_better = True
    is_share = True
    preference = 121
    explanations = (_FLOORS,)


class TargetError(Metric):
    """Root mean square error of several claimed numbers, in standard deviations of public ones, after assignment."""

    title = "target error"
    higher_is_better = False
    lowest = 0.0
    preference = 122
    explanations = (_FLOORS,)


def score_targets(
    claimed: Tensor, true: Tensor, goal: Goal, public: PublicExamples | None, rng: torch.Generator
) -> Score:
    """Score claimed rows of targets; the floor is the best of guesses that are as many and as diverse.

    Each number is measured in standard deviations from the mean of the public ones, so that numbers of different units
    count alike; without public examples there is no score of numbers.

    Args:
        true: `example target`, labels (0 or 1) or numbers.
        public: examples that the victim does not hold, with targets like its own.
    """
    measure = labels_right if goal == "labels" else target_error
    metric = "labels_right" if goal == "labels" else "target_error"
    count, width = max(len(claimed), len(true)), true.shape[1]
    rows = None if public is None else public.labels
    if goal != "labels":
        if rows is None:
            return Score.from_reason(metric, "no public examples are known, by which numbers of any unit are compared")
        claimed, true, rows = _standardise((claimed, true, rows), by=rows)

    def draw_rows() -> Tensor:
        if goal == "labels":
            return torch.randint(2, (count, width), generator=rng).float()
        return torch.randn((count, width), generator=rng)

    guesses = {"random targets": mean_of_draws(lambda: measure(draw_rows(), true))}
    constants = {"no label": torch.zeros(1, width), "every label": torch.ones(1, width)}
    if rows is not None:
        constants = {"mean of public targets": rows.mean(0, keepdim=True)}
        without_labels = PublicExamples(data=rows, labels=torch.zeros(len(rows)))
        centres = centres_of_claims(without_labels, torch.zeros(count))
        guesses["k-means of public targets"] = measure(_as_targets(centres, goal), true)
        guesses["random public targets"] = mean_of_draws(
            lambda: measure(rows[torch.randint(len(rows), (count,), generator=rng)], true)
        )
    for name, constant in constants.items():
        guesses[name] = measure(_as_targets(constant, goal).expand(count, width), true)
    return Score.against_guesses(metric, measure(claimed, true), guesses)


def labels_right(claimed: Tensor, true: Tensor) -> float:
    """Return the share of the labels that are right; those of an example without a claim are wrong.

    >>> labels_right(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    0.5
    """
    agreement = 1 - torch.cdist(claimed.double(), true.double(), p=1) / true.shape[1]
    return best_sum(agreement, maximize=True) / len(true)


def target_error(claimed: Tensor, true: Tensor) -> float:
    """Return the root mean square error; of an example without a claim, that of claiming the mean, which is 0.

    >>> target_error(torch.tensor([[2.0], [0.0]]), torch.tensor([[0.0], [1.0]]))
    0.7071067811865476
    """
    missing = max(0, len(true) - len(claimed))
    rows = torch.cat([claimed.double(), torch.zeros(missing, true.shape[1], dtype=torch.float64)])
    errors = (rows[:, None] - true.double()[None]).square().mean(2)
    return float((best_sum(errors, maximize=False) / len(true)) ** 0.5)


def index_rows(public: Tensor | None, *parts: Tensor) -> list[Tensor]:
    """Return for rows of labels an index of each kind of row, so that guesses can be made of examples of the same kind.

    The kinds of `public` come first, in ascending order, so that their indices do not depend on the others.

    Args:
        public: `example label`; None where no public examples are known.
        parts: likewise; the indices of each are returned.

    >>> index_rows(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))[0].tolist()
    [1, 0]
    """
    known = set() if public is None else set(map(tuple, public.tolist()))
    others = {tuple(row) for part in parts for row in part.tolist()} - known
    numbers = {row: number for number, row in enumerate([*sorted(known), *sorted(others)])}
    return [torch.tensor([numbers[tuple(row)] for row in part.tolist()], dtype=torch.int64) for part in parts]


def _standardise(parts: Sequence[Tensor], *, by: Tensor) -> list[Tensor]:
    """Return the numbers of each part in standard deviations of `by` from its mean; one that never varies as it is."""
    mean, deviation = by.double().mean(0), by.double().std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return [((part.double() - mean) / deviation).float() for part in parts]


def _as_targets(rows: Tensor, goal: Goal) -> Tensor:
    return (rows > 0.5).float() if goal == "labels" else rows


def mean_of_draws(measure: Callable[[], float]) -> float:
    """Return the mean score of `_DRAWS` random guesses."""
    return sum(measure() for _ in range(_DRAWS)) / _DRAWS


def best_sum(values: Tensor, *, maximize: bool) -> float:
    """Return the sum of values, `claim example`, over the best assignment of claims to examples."""
    from scipy.optimize import linear_sum_assignment

    claims, examples = linear_sum_assignment(values.numpy(), maximize=maximize)
    return float(values[torch.from_numpy(claims), torch.from_numpy(examples)].sum())
