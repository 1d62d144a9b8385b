"""Which gradients are of the same mini-batch: alike in labels and in direction."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.inversion.alignment import align


def around(centre: Tensor, count: int, size: float, seed: int) -> list[Tensor]:
    return [centre + size * torch.randn(centre.shape, generator=generator(seed, i)) for i in range(count)]


def test_gradients_split_batches_that_share_their_labels() -> None:
    first, second = torch.randn((2, 400), generator=generator(0))
    rows = [*around(first, 3, 0.3, 1), *around(second, 2, 0.3, 2)]
    order = [0, 3, 1, 4, 2]
    labels = [torch.tensor([5, 6])] * 5
    assert align(labels, [rows[i] for i in order], 0.9) == [(0, 2, 4), (1, 3)]


def test_a_label_that_was_recovered_wrongly_does_not_tear_a_mini_batch_apart() -> None:
    rows = around(torch.randn(400, generator=generator(0)), 3, 0.3, 1)
    labels = [torch.tensor([0, 1, 2, 3, 4, 5, 6, last]) for last in (7, 7, 8)]
    assert align(labels, rows) == [(0, 1, 2)]


def test_labels_that_large_mini_batches_share_by_chance_do_not_join_them() -> None:
    """34 of 40 labels in common is chance with 4 classes, and far above it with 40."""
    row = torch.ones(10)
    few = [torch.arange(4).repeat_interleave(torch.tensor(counts)) for counts in ([10, 10, 10, 10], [13, 13, 7, 7])]
    assert align(few * 3, [row] * 6) == [(0, 2, 4), (1, 3, 5)]
    many = [torch.arange(40), torch.cat([torch.arange(34), torch.arange(6)])]
    assert align(many * 3, [row] * 6) == [(0, 1, 2, 3, 4, 5)]


def test_other_labels_and_other_sizes_set_equal_directions_apart() -> None:
    row = torch.ones(10)
    assert align([torch.tensor([0, 1]), torch.tensor([2, 3])], [row, row]) == [(0,), (1,)]
    assert align([torch.tensor([0, 1]), torch.tensor([0])], [row, row], -1.0) == [(0,), (1,)]


@pytest.mark.parametrize("similarity", [-1.0, 0.3, 0.5, 0.7, 0.9])
def test_groups_are_those_of_average_linkage(similarity: float) -> None:
    """SciPy's average linkage of the unlikeness, written out, cut at the same height."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    from scipy.stats import binom

    centres = torch.randn((4, 30), generator=generator("centres"))
    rows = list(itertools.chain.from_iterable(around(c, 4, 0.6, i) for i, c in enumerate(centres)))
    labels = [torch.randint(0, 4, (6,), generator=generator("labels", i)) for i in range(16)]
    every = torch.cat(labels).tolist()
    chance = float(
        sum(binom.sf(k, 6, every.count(c) / len(every)) ** 2 for c, k in itertools.product(range(4), range(6))) / 6
    )
    unlike = torch.zeros((16, 16), dtype=torch.float64)
    for a, b in itertools.product(range(16), repeat=2):
        left, right = labels[a].tolist(), labels[b].tolist()
        common = sum(min(left.count(c), right.count(c)) for c in range(4)) / 6
        cosine = float(torch.dot(rows[a], rows[b]) / (rows[a].norm() * rows[b].norm()))
        unlike[a, b] = 0 if a == b else 1 - (0.8 * (common - chance) / (1 - chance) + 0.2 * cosine)
    cut = fcluster(linkage(squareform(unlike.numpy(), checks=False), "average"), 1 - similarity, "distance")
    expected = {frozenset(i for i in range(16) if cut[i] == name) for name in set(cut)}
    found = align(labels, rows, similarity)
    assert {frozenset(group) for group in found} == expected
    assert sorted(itertools.chain.from_iterable(found)) == list(range(16))
