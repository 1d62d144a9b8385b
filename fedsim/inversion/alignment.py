"""Grouping of a client's gradients by the mini-batch they are of (TGIAs-RO, Sect. 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Binomial

_LABEL_SHARE = 0.8
"""Weight of the labels in the similarity of two gradients; their direction has the rest."""


def align(labels: Sequence[Tensor], gradients: Sequence[Tensor], similarity: float = 0.7) -> list[tuple[int, ...]]:
    """Group gradients of the same mini-batch: those with similar labels and direction.

    The similarity of two gradients is 0.8 times the share of labels that they have in common, as
    far as that exceeds chance, plus 0.2 times their cosine. Groups are joined by average linkage
    while their mean similarity is at least `similarity`; gradients of mini-batches of different
    sizes are never joined. So a label that was recovered wrongly in one round does not split a
    mini-batch, as grouping by equal labels would; nor are large mini-batches of few classes joined
    because their labels must be much the same.

    Args:
        labels: of each gradient, `example`, recovered from it, in any order.
        gradients: `parameter`, one row each.
        similarity: in [-1, 1].

    Returns:
        Indices of the gradients, group by group; groups in the order of their first members.

    References:
        [Li2023b], Sect. 3.4.2 and 4.2.2. Differs: the paper groups by equal labels first, and does
        not say how high a cosine is high.

    >>> align([torch.tensor([0, 1]), torch.tensor([2, 2]), torch.tensor([1, 0])], [torch.ones(5)] * 3)
    [(0, 2), (1,)]
    """
    groups = _link_groups(_similarities(labels, gradients), similarity)
    return sorted(tuple(group) for group in groups)


def _similarities(labels: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `gradient gradient`; minus infinity if N differs."""
    # Compare the labels.
    classes = 1 + max(int(batch_labels.max()) for batch_labels in labels)
    counts = torch.stack([torch.bincount(batch_labels.cpu(), minlength=classes) for batch_labels in labels])
    sizes = counts.sum(1)
    common = torch.stack([torch.minimum(row, counts).sum(1) / sizes for row in counts]).double()
    chance = torch.stack([_share_in_common_by_chance(counts, int(size)) for size in sizes])[:, None]
    above_chance = 1 - (1 - common) / (1 - chance).clamp_min(torch.finfo(common.dtype).tiny)
    # Compare the directions.
    rows = torch.stack(list(gradients))
    products = (rows @ rows.T).double().cpu()
    norms = products.diagonal().sqrt().clamp_min(torch.finfo(products.dtype).tiny)
    cosines = products / norms / norms[:, None]
    similarities = _LABEL_SHARE * above_chance + (1 - _LABEL_SHARE) * cosines
    return similarities.masked_fill(sizes[:, None] != sizes[None], -torch.inf)


def _share_in_common_by_chance(counts: Tensor, size: int) -> Tensor:
    """Return the share of labels that two random mini-batches of `size` have in common.

    Labels are drawn from all labels. For each class E[min] = sum_k P[count >= k]^2.

    Args:
        counts: `gradient class`.
    """
    class_counts = counts.sum(0).double()
    draws = Binomial(size, class_counts / class_counts.sum())
    log_probabilities: Tensor = draws.log_prob(torch.arange(size)[:, None])
    return (1 - log_probabilities.exp().cumsum(0)).square().sum() / size


def _link_groups(similarities: Tensor, least: float) -> list[list[int]]:
    """Join the two groups of largest mean similarity until it is below `least`."""
    groups = [[index] for index in range(len(similarities))]
    means = similarities.double().fill_diagonal_(-torch.inf)
    while len(groups) > 1:
        a, b = sorted(divmod(int(means.argmax()), len(groups)))
        if means[a, b] < least:
            break
        # Average the similarities to the two groups, by their sizes.
        size_a, size_b = len(groups[a]), len(groups[b])
        row = (size_a * means[a] + size_b * means[b]) / (size_a + size_b)
        means[a], means[:, a] = row, row
        means[a, a] = -torch.inf
        # Remove the second group.
        remaining = torch.arange(len(groups)) != b
        means = means[remaining][:, remaining]
        groups[a] = sorted(groups[a] + groups.pop(b))
    return groups
