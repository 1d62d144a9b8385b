"""Which recorded gradients of a client are of the same mini-batch (TGIAs-RO, Sect. 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Binomial

_LABELS = 0.8
"""Share of the labels in a likeness."""


def align(
    labels: Sequence[Tensor], gradients: Sequence[Tensor] | None = None, similarity: float = 0.7
) -> list[tuple[int, ...]]:
    """Group gradients that are of the same mini-batch: those that are alike in labels and in direction.

    The likeness of two gradients is 0.8 times the share of their labels that they have in common, as far as that is
    above chance, plus 0.2 times their cosine. Groups are joined by average linkage while their mean likeness is at
    least `similarity`; gradients of mini-batches of different sizes never are. So a label that was recovered wrongly
    in one round does not tear a mini-batch apart, as grouping by equal labels would; nor are large mini-batches of
    few classes joined because their labels must be much the same.

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
    common = torch.stack([torch.minimum(row, counts).sum(1) / sizes for row in counts]).double()
    chance = torch.stack([_in_common_by_chance(counts, int(size)) for size in sizes])[:, None]
    above = 1 - (1 - common) / (1 - chance).clamp_min(torch.finfo(common.dtype).tiny)
    rows = torch.stack(list(gradients))
    products = (rows @ rows.T).double().cpu()
    lengths = products.diagonal().sqrt().clamp_min(torch.finfo(products.dtype).tiny)
    likeness = _LABELS * above + (1 - _LABELS) * (products / lengths / lengths[:, None])
    return likeness.masked_fill(sizes[:, None] != sizes[None], -torch.inf)


def _in_common_by_chance(counts: Tensor, size: int) -> Tensor:
    """Share of labels that two mini-batches of `size` have in common, drawn from all labels: E[min] = sum_k P[>= k]^2.

    Args:
        counts: `gradient class`.
    """
    frequent = counts.sum(0).double()
    draws = Binomial(size, frequent / frequent.sum())
    below: Tensor = draws.log_prob(torch.arange(size)[:, None])  # type: ignore[no-untyped-call]
    return (1 - below.exp().cumsum(0)).square().sum() / size


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
