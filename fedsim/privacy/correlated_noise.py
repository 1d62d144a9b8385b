"""Noise that is correlated over rounds, so that much of it cancels in the sum over rounds.

A server that moves its model by noisy sums x_t + y_t releases, after k rounds, a model with the
noise y_1 + ... + y_k. Independent noise adds up. Two ways to correlate it are here:

- a *tree* (DP-FTRL): sums over the first rounds of a cycle are made of noisy partial sums, the
  nodes of a binary tree. A client is in as many nodes as the tree is high;
- *bands* (matrix factorisation): y = C^-1 z, where the rows of z are fresh noise and C is lower
  triangular with the same few bands in each column. Who multiplies what is released by C has C x + z,
  so that a client who adds to round t is seen in as many rows of fresh noise as C has bands.

A client that takes part again only after all of these rows shares none with its earlier round. Its
rounds then cost what as many Gaussian mechanisms cost. Both matrices are public.

References:
    [Kairouz2021], App. D, for the tree; [Denisov2022] for C^-1 z against adaptive sums;
    [ChoquetteChoo2023] for bands and a smallest separation of a client's rounds;
    [Fichtenberger2023] for the square root of the matrix of prefix sums, and [Kalinin2024] for its
    first bands. The best bands for so many rounds, the same in each column, differ little from them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Correlation = Literal["independent", "tree", "banded"]


def compute_square_root_bands(count: int) -> Numbers:
    """Return the first bands of the square root of the matrix of prefix sums, `band`, of norm 1.

    The square root of the lower triangle of ones has the coefficients of (1 - x)^(-1/2).

    >>> compute_square_root_bands(1).tolist()
    [1.0]
    >>> bands = compute_square_root_bands(3)
    >>> (bands / bands[0]).round(3).tolist()
    [1.0, 0.5, 0.375]
    """
    index = np.arange(1, count)
    bands = np.cumprod(np.concatenate([[1.0], (2 * index - 1) / (2 * index)]))
    return np.asarray(bands / np.linalg.norm(bands))


def make_band_matrix(bands: Numbers, rounds: int) -> Numbers:
    """Return C, `row round`, lower triangular with these bands."""
    matrix = np.zeros((rounds, rounds))
    for offset, value in enumerate(bands[:rounds]):
        matrix += value * np.eye(rounds, k=-offset)
    return matrix


def count_nodes(rounds: int) -> int:
    """Return in how many nodes of a binary tree over so many rounds one of them is at most.

    References:
        [Kairouz2021], App. D: the height of the largest whole subtree.

    >>> [count_nodes(rounds) for rounds in (1, 2, 3, 4, 7, 8)]
    [1, 2, 2, 3, 3, 4]
    """
    return rounds.bit_length()


def split_prefix(length: int) -> list[tuple[int, int]]:
    """Split the first `length` rounds into whole subtrees, each as its first round and its size.

    >>> split_prefix(6), split_prefix(7)
    ([(0, 4), (4, 2)], [(0, 4), (4, 2), (6, 1)])
    """
    nodes: list[tuple[int, int]] = []
    start = 0
    for level in reversed(range(length.bit_length())):
        if length >> level & 1:
            nodes.append((start, 1 << level))
            start += 1 << level
    return nodes


def list_tree_terms(index: int) -> dict[tuple[int, int], int]:
    """Return, by node, the sign with which its noise enters round `index` of a cycle, from 0 on.

    The sum over the first k rounds has the noise of the nodes that k has bits for. A round adds what
    that grows by.

    >>> list_tree_terms(1)
    {(0, 2): 1, (0, 1): -1}
    """
    after, before = split_prefix(index + 1), split_prefix(index)
    terms = {node: 1 for node in after if node not in before}
    return terms | {node: -1 for node in before if node not in after}


def compute_noise_covariance(correlation: Correlation, rounds: int, cycle: int, num_bands: int) -> Numbers:
    """Compute the covariance of the noise of the rounds, `round round`, in units of that of fresh noise.

    Args:
        correlation: how noise is correlated.
        rounds: how many rounds there are.
        cycle: after how many rounds a tree begins anew.
        num_bands: how many bands there are.
    """
    if correlation == "banded":
        inverse = np.linalg.inv(make_band_matrix(compute_square_root_bands(num_bands), rounds))
        return np.asarray(inverse @ inverse.T)
    if correlation == "independent":
        return np.eye(rounds)
    # Write each round's noise as a sum of nodes, each with fresh noise of its own.
    nodes: dict[tuple[int, int, int], int] = {}
    terms = np.zeros((rounds, 2 * rounds))
    for number in range(rounds):
        number_of_cycle, index = divmod(number, cycle)
        for node, sign in list_tree_terms(index).items():
            terms[number, nodes.setdefault((number_of_cycle, *node), len(nodes))] = sign
    return np.asarray(terms @ terms.T)
