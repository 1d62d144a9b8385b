"""Doubt membership scores where members and other candidates differ in more than membership.

A score of membership takes it that a member could as well be one of the others. Where they are of
different kinds, as the records of one hospital beside those of all, or the news of one year beside
those of the next, an attack that is told the kind ranks them right, whoever was trained on. So a
classifier that sees no message learns of half of the candidates which are members, and ranks the
other half.

References:
    [Das2024] (such classifiers are ahead of published membership attacks on published candidates).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.base.task import are_classes
from fedsim.federation.candidates import CandidateRecords

_DEVIATIONS = 3.5
"""Standard deviations beyond chance from which on candidates are doubted: by chance one of 4000 sets is."""
_MOST_CANDIDATES, _MOST_PRODUCTS = 1000, 1e10
"""Most candidates that are compared, and most products of their values."""


def doubt_candidates(drawn: CandidateRecords, where: str) -> None:
    """Raise a doubt where candidates alone tell which of them are members."""
    area, deviations = measure_blind_ranking(drawn)
    if deviations > _DEVIATIONS:
        raise_doubt(
            "%s: candidates differ in more than membership: who sees no message, and learns of half of them which are "
            "members, ranks the other half with an AUC of %.2f; so scores may show what kind of records the client "
            "holds, and not on which it trained; compare with others of the same kind, as 'other-clients' are in the "
            "partitions iid and dirichlet",
            *(where, area),
        )


def measure_blind_ranking(drawn: CandidateRecords) -> tuple[float, float]:
    """Return the AUC of the classifier, and how many standard deviations beyond chance it is.

    It is a ridge regression on a Gaussian kernel, fitted to the first half of the candidates, whose
    order is random. To fit it to the other half, too, would add next to nothing: both ways compare
    the same pairs.
    """
    from sklearn.metrics import roc_auc_score  # takes a second

    values = _candidate_values(drawn)
    values = values[: min(_MOST_CANDIDATES, math.isqrt(int(_MOST_PRODUCTS / values.shape[1])))]
    count, half = len(values), len(values) // 2
    targets, is_member = drawn.members[:half].double(), drawn.members[half:count]
    members = int(is_member.sum())
    if members in (0, len(is_member)):
        return 0.5, 0.0
    distances = torch.cdist(values, values[:half]).square().double()
    kernel = torch.exp(-distances / distances.median().clamp_min(1e-12))
    ridge = kernel[:half] + torch.eye(half, dtype=torch.float64)
    area = float(roc_auc_score(is_member, kernel[half:] @ torch.linalg.solve(ridge, targets - targets.mean())))
    variance = (len(is_member) + 1) / (12 * members * (len(is_member) - members))  # Mann and Whitney's
    return area, (area - 0.5) / math.sqrt(variance)


def _candidate_values(drawn: CandidateRecords) -> Tensor:
    """Return `candidate value`, standardised: inputs, how often each token occurs, and labels that are no classes.

    Members are paired with others of their class, so classes tell nothing.
    """
    inputs = drawn.inputs.flatten(1)
    if not inputs.is_floating_point():
        tokens, numbers = torch.unique(inputs, return_inverse=True)
        inputs = torch.zeros(len(inputs), len(tokens)).scatter_add_(1, numbers, torch.ones(numbers.shape))
    values = inputs.float()
    if not are_classes(drawn.labels):
        values = torch.cat([values, drawn.labels.reshape(len(values), -1).float()], 1)
    deviations = values.std(0, correction=0)
    return torch.where(deviations > 0, (values - values.mean(0)) / deviations, 0.0)
