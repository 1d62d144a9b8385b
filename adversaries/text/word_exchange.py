"""Exchange of words between texts of one class, as a refinement of reconstructed texts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exchange_words(
    tokens: Tensor, labels: Tensor, distance: Callable[[Tensor], float], sweeps: int = 3
) -> tuple[Tensor, float]:
    """Exchange words between texts of one label wherever that lowers the gradient distance.

    Two texts of one class with equal confidence can exchange their words at the same positions
    without changing the gradient, except in windows across the cut. An optimiser of embeddings
    rarely gets from one such arrangement to another. Here, for each pair of texts and each
    position, all words from there on, or the one word, are exchanged, and the exchange is kept if
    the distance decreases.

    Args:
        tokens: `example position`.
        labels: `example`.
        distance: maps tokens to the distance of their gradient from the recorded one.
        sweeps: most passes over all pairs and positions; stops when nothing changes.

    Returns:
        The tokens, and their distance.

    >>> truth = torch.tensor([[1, 2], [3, 4]])
    >>> mixed_up = torch.tensor([[1, 4], [3, 2]])
    >>> exchange_words(mixed_up, torch.zeros(2), lambda tokens: float((tokens != truth).sum()))
    (tensor([[1, 2],
            [3, 4]]), 0.0)
    """
    tokens, lowest = tokens.clone(), distance(tokens)
    length = tokens.shape[1]
    pairs = [(i, j) for i in range(len(tokens)) for j in range(i) if labels[i] == labels[j]]
    spans = []
    for position in range(length):
        spans += [slice(position, length), slice(position, position + 1)]
    del spans[0]  # to exchange whole texts changes nothing
    for _ in range(sweeps):
        lowest_before = lowest
        for span in spans:
            for i, j in pairs:
                if torch.equal(tokens[i, span], tokens[j, span]):
                    continue
                exchanged = tokens.clone()
                exchanged[i, span], exchanged[j, span] = tokens[j, span], tokens[i, span]
                if (value := distance(exchanged)) < lowest:
                    tokens, lowest = exchanged, value
        if lowest == lowest_before:
            break
    return tokens, lowest
