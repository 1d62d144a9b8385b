"""Sorts out texts of one class whose words were mixed up, by the gradient of the words themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exchange(
    tokens: Tensor, labels: Tensor, distance: Callable[[Tensor], float], sweeps: int = 3
) -> tuple[Tensor, float]:
    """Let texts of one label exchange words wherever that brings their gradient closer to the recorded one.

    Two texts of one class that the network holds for equally likely can exchange what is at the same places
    without changing the gradient; only windows over both sides of the cut tell them apart. An optimiser of embeddings
    rarely finds its way from one such arrangement to another. Here, for each pair of texts and each place, all words
    from there on are exchanged, or the one word, and the exchange is kept where the distance falls.

    Args:
        tokens: `example place`.
        labels: `example`.
        distance: of the gradient of such tokens from the recorded one.
        sweeps: how often all pairs and places are tried at most; it stops when nothing changes.

    Returns:
        The tokens, and their distance.
    """
    tokens, best = tokens.clone(), distance(tokens)
    length = tokens.shape[1]
    pairs = [(i, j) for i in range(len(tokens)) for j in range(i) if labels[i] == labels[j]]
    spans = [span for place in range(length) for span in (slice(place, length), slice(place, place + 1))][1:]
    for _ in range(sweeps):
        before = best
        for span in spans:
            for i, j in pairs:
                if torch.equal(tokens[i, span], tokens[j, span]):
                    continue
                tried = tokens.clone()
                tried[i, span], tried[j, span] = tokens[j, span], tokens[i, span]
                if (now := distance(tried)) < best:
                    tokens, best = tried, now
        if best == before:
            break
    return tokens, best
