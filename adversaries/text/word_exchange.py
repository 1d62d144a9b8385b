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


def change_one_word(text: Tensor, words: Tensor, padding: int | None) -> Tensor:
    """Return all texts with one word changed, added at the end or removed there, `choice position`.

    Args:
        text: `position`.
        words: `choice position`, the words that are tried at each position.
        padding: the padding token, or None where all texts have the full length.
    """
    length = len(text)
    num_words = length if padding is None else int((text != padding).sum())
    changed = text.expand(num_words, len(words), length).clone()
    for position in range(num_words):
        changed[position, :, position] = words[:, position]
    variants = [changed.flatten(0, 1)]
    if padding is not None and num_words > 1:
        variants.append(torch.where(torch.arange(length) < num_words - 1, text, padding)[None])
    if padding is not None and num_words < length:
        longer = text.expand(len(words), length).clone()
        longer[:, num_words] = words[:, num_words]
        variants.append(longer)
    return torch.cat(variants)
