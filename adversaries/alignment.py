"""Which recorded gradients of a client are of the same mini-batch (TGIAs-RO, Sect. 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def align(
    labels: Sequence[Tensor], gradients: Sequence[Tensor] | None = None, similarity: float = 0.5
) -> list[tuple[int, ...]]:
    """Group gradients that are of the same mini-batch: those with the same labels, and among them those alike.

    Args:
        labels: of each gradient, `example`, recovered from it; their order does not matter.
        gradients: `parameter`, each gradient in one row; None compares labels only.
        similarity: gradients with the same labels are grouped by average linkage, and groups are joined while
            the mean cosine between their members is at least this.

    Returns:
        Places of the gradients in the order given, group by group; groups in the order of their first members.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, Sect. 3.4.2 and 4.2.2. Differs:
        the paper does not say how high a cosine is high.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, found in enumerate(labels):
        alike.setdefault(tuple(found.sort().values.tolist()), []).append(place)
    groups: list[tuple[int, ...]] = []
    for places in alike.values():
        if gradients is None or len(places) == 1:
            groups.append(tuple(places))
        else:
            rows = torch.stack([gradients[place] for place in places])
            groups += [tuple(places[member] for member in members) for members in _linked(rows, similarity)]
    return sorted(groups)


def _linked(rows: Tensor, similarity: float) -> list[list[int]]:
    """Average linkage by cosine: join the two groups that are most alike while they are alike enough."""
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    cosines = rows @ rows.T
    groups = [[place] for place in range(len(rows))]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        means = [float(cosines[groups[a]][:, groups[b]].mean()) for a, b in pairs]
        best = max(range(len(pairs)), key=means.__getitem__)
        if means[best] < similarity:
            break
        a, b = pairs[best]
        groups[b] = sorted(groups[b] + groups.pop(a))
    return groups
