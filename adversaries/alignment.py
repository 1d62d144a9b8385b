"""Which recorded gradients of a client are of the same mini-batch (TGIAs-RO, Sect. 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

_LABELS = 0.8
"""Share of the labels in a likeness. With CIFAR-10, a LeNet and b = 16, 2/3 and 4/5 do alike, less does worse."""

_CONSISTENT = 0.8
"""Share of gradients with an equally labelled other one, from which on recovered labels are taken at their word."""


def align(
    labels: Sequence[Tensor], gradients: Sequence[Tensor] | None = None, similarity: float = 0.75
) -> list[tuple[int, ...]]:
    """Group gradients that are of the same mini-batch: those that are alike in labels and in direction.

    The likeness of two gradients is 0.8 times the share of their labels that they have in common plus 0.2 times their
    cosine. Groups are joined by average linkage while their mean likeness is at least `similarity`; gradients of
    mini-batches of different sizes never are. So a label that was recovered wrongly in one round does not tear a
    mini-batch apart, as grouping by equal labels would. But where four fifths of the gradients have another one with
    equal labels, recovery does not err much, and gradients with different labels are not joined either.

    Args:
        labels: of each gradient, `example`, recovered from it; their order does not matter.
        gradients: `parameter`, each gradient in one row; None groups by equal labels only.
        similarity: in [-1, 1].

    Returns:
        Places of the gradients in the order given, group by group; groups in the order of their first members.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, Sect. 3.4.2 and 4.2.2. Differs:
        groups by equal labels first, and does not say how high a cosine is high.
    """
    if gradients is None:
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, found in enumerate(labels):
            alike.setdefault(tuple(found.sort().values.tolist()), []).append(place)
        return sorted(tuple(places) for places in alike.values())
    return sorted(tuple(group) for group in _linked(_likeness(labels, gradients), similarity))


def _likeness(labels: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """`gradient gradient`; minus infinity where N differs."""
    classes = 1 + max(int(found.max()) for found in labels)
    counts = torch.stack([torch.bincount(found.cpu(), minlength=classes) for found in labels])
    sizes = counts.sum(1)
    common = torch.stack([torch.minimum(row, counts).sum(1) / sizes for row in counts])
    rows = normalize(torch.stack(list(gradients)).float().cpu(), dim=1)
    likeness = _LABELS * common + (1 - _LABELS) * (rows @ rows.T)
    equal = (counts[:, None] == counts[None]).all(2)
    reliable = (equal.sum(1) > 1).float().mean() >= _CONSISTENT
    return likeness.masked_fill(~equal if reliable else sizes[:, None] != sizes[None], -torch.inf)


def _linked(likeness: Tensor, similarity: float) -> list[list[int]]:
    """Average linkage: join the two groups that are most alike while they are alike enough."""
    groups = [[place] for place in range(len(likeness))]
    means = likeness.double().fill_diagonal_(-torch.inf)
    while len(groups) > 1:
        best = int(means.argmax())
        a, b = sorted(divmod(best, len(groups)))
        if means[a, b] < similarity:
            break
        first, second = len(groups[a]), len(groups[b])
        row = (first * means[a] + second * means[b]) / (first + second)
        means[a], means[:, a] = row, row
        means[a, a] = -torch.inf
        keep = torch.arange(len(groups)) != b
        means = means[keep][:, keep]
        groups[a] = sorted(groups[a] + groups.pop(b))
    return groups
