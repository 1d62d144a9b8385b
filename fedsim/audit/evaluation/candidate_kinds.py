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

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.base.task import are_classes
from fedsim.federation.candidates import CandidateRecords

_DEVIATIONS = 3.5
"""Standard deviations beyond chance from which on candidates are doubted: by chance one of 4000 sets is."""
MOST_CANDIDATES, _MOST_PRODUCTS = 1000, 1e10
"""Most candidates that are compared, and most products of their values."""


@dataclass(frozen=True, eq=False)
class BlindRanking:
    """How a classifier that sees no message ranks half of some candidates.

    Attributes:
        area: AUC; 0.5 where there is nothing to rank.
        deviation: standard deviation of it by chance; infinite where there is nothing to rank.
        records: hashes of the candidates.
    """

    area: float
    deviation: float
    records: frozenset[bytes]


def doubt_candidates(own: BlindRanking, others: Sequence[BlindRanking], where: str) -> None:
    """Raise a doubt where candidates alone tell which of them are members.

    Args:
        others: of further clients, as the few candidates of one tell little; a client that is doubted by itself tells
            nothing of this one.
    """
    alone, *rest = ([ranking] if math.isfinite(ranking.deviation) else [] for ranking in (own, *others))
    together = itertools.chain(alone, *(ranking for ranking in rest if not _is_beyond_chance(ranking)))
    for ranked in (alone, list(together)):
        if _is_beyond_chance(ranked):
            raise_doubt(
                "%s: candidates differ in more than membership: who sees no message, and learns of half of them which "
                "are members, ranks the other half with an AUC of %.2f%s; so scores may show what kind of records the "
                "client holds, and not on which it trained; compare with others of the same kind, as 'other-clients' "
                "are in the partitions iid and dirichlet",
                where,
                sum(ranking.area for ranking in ranked) / len(ranked),
                f", the mean over {len(ranked)} clients" if ranked is not alone else "",
            )
            return


def _is_beyond_chance(ranked: Sequence[BlindRanking]) -> bool:
    return sum(ranking.area - 0.5 for ranking in ranked) > _DEVIATIONS * _deviation_of_sum(ranked) > 0


def _deviation_of_sum(rankings: Sequence[BlindRanking]) -> float:
    """Return the standard deviation of the sum of areas by chance.

    Where two clients have a share of candidates in common, both the classifiers and what they rank are alike by it.
    """
    variance = 0.0
    for first, second in itertools.product(rankings, repeat=2):
        shared = len(first.records & second.records) / min(len(first.records), len(second.records))
        variance += shared**2 * first.deviation * second.deviation
    return math.sqrt(variance)


def rank_blindly(drawn: CandidateRecords) -> BlindRanking:
    """Rank candidates by a classifier that sees no message.

    It is a ridge regression on a Gaussian kernel, fitted to one half of the candidates, each of which
    has as many members as others of each class: otherwise a class with more members in one half has
    fewer in the other, and what is learnt is wrong there. To fit it to the other half, too, would add
    next to nothing: both ways compare the same pairs.
    """
    from sklearn.metrics import roc_auc_score  # takes a second

    values = _candidate_values(drawn)
    values = values[: min(MOST_CANDIDATES, math.isqrt(int(_MOST_PRODUCTS / values.shape[1])))]
    first, second = _split_in_halves(drawn, len(values))
    records = frozenset(hashlib.sha256(row.numpy().tobytes()).digest() for row in drawn.inputs[: len(values)])
    targets, is_member = drawn.members[first].double(), drawn.members[second]
    members = int(is_member.sum())
    if members in (0, len(is_member)):
        return BlindRanking(0.5, math.inf, records)
    distances = torch.cdist(values, values[first]).square().double()
    kernel = torch.exp(-distances / distances.median().clamp_min(1e-12))
    ridge = kernel[first] + torch.eye(len(first), dtype=torch.float64)
    area = float(roc_auc_score(is_member, kernel[second] @ torch.linalg.solve(ridge, targets - targets.mean())))
    variance = (len(is_member) + 1) / (12 * members * (len(is_member) - members))  # Mann and Whitney's
    return BlindRanking(area, math.sqrt(variance), records)


def _split_in_halves(drawn: CandidateRecords, count: int) -> tuple[list[int], list[int]]:
    """Split the first `count` candidates, of each class pairs of a member and another by turns."""
    members = drawn.members[:count]
    classes = drawn.labels[:count] if are_classes(drawn.labels) else torch.zeros(count)
    halves: tuple[list[int], list[int]] = ([], [])
    for label in torch.unique(classes):
        of_class = classes == label
        of_members, of_others = (of_class & members).nonzero(), (of_class & ~members).nonzero()
        for pair in zip(of_members.flatten().tolist(), of_others.flatten().tolist(), strict=False):
            min(halves, key=len).extend(pair)
    return halves


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
