"""How much of a batch of texts was found: pure functions over `example place` tokens.

Padding, the token that fills short texts up, is never counted among the true tokens.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

NOTHING = -1
"""Marks a place for which no token is claimed."""


def are_empty(texts: Tensor, padding: int | None) -> Tensor:
    """`text`: whether it has no token but padding."""
    return ~_real(texts, padding).any(1)


def right_places(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """`true claimed`: for each pair of texts, the fraction of the true tokens that stand in their places.

    Args:
        claimed: `claimed place`.
        true: `true place`.
        padding: the token that is none, or None.
    """
    real = _real(true, padding)
    same = (true[:, None] == claimed[None]) & real[:, None]
    return same.sum(2) / real.sum(1, keepdim=True).clamp_min(1)


def ends_right(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """`text`: whether nothing is claimed behind the end of each true text, see `paired_texts`."""
    behind = ~_real(true, padding)
    nothing = claimed == NOTHING if padding is None else (claimed == NOTHING) | (claimed == padding)
    return (nothing | ~behind).all(1)


def found_tokens(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """`true claimed`: the same wherever the tokens stand: the common part of both multisets."""
    real = _real(true, padding)
    shares = []
    for text, kept in zip(true, real, strict=True):
        words, often = _counted(text[kept])
        there = (claimed[:, :, None] == words).sum(1)
        shares.append(torch.minimum(there, often).sum(1) / max(1, int(kept.sum())))
    return torch.stack(shares)


def words_found(claimed: Tensor, true: Tensor, padding: int | None) -> float:
    """The fraction of the different words of all true texts that are claimed in any text."""
    words = _counted(true[_real(true, padding)])[0]
    return torch.isin(words, claimed).double().mean().item()


def rouge(claimed: Tensor, true: Tensor, padding: int | None, words: int) -> Tensor:
    """`text`: ROUGE-1 or ROUGE-2, the F1 of the runs of so many words that both texts of a pair hold, as multisets.

    Padding is in neither, nor are places for which nothing is claimed. Without any such run in either, it is 0.

    Args:
        claimed: `text place`, in the order of the true ones, see `paired_texts`.
        true: `text place`.
        padding: the token that is none, or None.
        words: length of a run.

    References:
        Lin: ROUGE: A Package for Automatic Evaluation of Summaries, 2004, Sect. 2; without stemming.
    """
    scores = []
    for pair in zip(claimed.tolist(), true.tolist(), strict=True):
        texts = [[token for token in text if token not in (padding, NOTHING)] for text in pair]
        found, held = (Counter(zip(*(text[start:] for start in range(words)), strict=False)) for text in texts)
        scores.append(2 * (found & held).total() / max(1, found.total() + held.total()))
    return torch.tensor(scores)


def paired_texts(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """For each true text, the claimed one assigned to it, or `NOTHING` at each place where fewer are claimed.

    One-to-one, so that the sum of the tokens found and of those in their places is largest (Hungarian algorithm).
    """
    from scipy.optimize import linear_sum_assignment

    alike = right_places(claimed, true, padding) + found_tokens(claimed, true, padding)
    places, chosen = (torch.from_numpy(index) for index in linear_sum_assignment(alike.numpy(), maximize=True))
    return torch.full_like(true, NOTHING).index_put((places,), claimed[chosen].to(true.dtype))


def likeliest_tokens(texts: Tensor, length: int, padding: int | None) -> Tensor:
    """`length` tokens, with repetitions, of which a text like these holds most on average.

    The k-th copy of a token is worth the fraction of the texts that hold it k times.

    Args:
        texts: `example place`.
    """
    words, often = _counted(texts[_real(texts, padding)])
    if not len(words):
        return texts.new_zeros(length)
    words = words[often.argsort(descending=True, stable=True)[: max(200, length)]]
    counts = torch.stack([(texts == word).sum(1) for word in words])
    copies = torch.arange(1, 5)
    worth = (counts[:, None] >= copies[:, None]).double().mean(2)
    order = worth.flatten().argsort(descending=True, stable=True)
    ranked = words.repeat_interleave(len(copies))[order]
    return ranked[torch.arange(length) % len(ranked)]


def frequent_words(texts: Tensor, count: int, padding: int | None) -> Tensor:
    """The `count` most frequent tokens, from the first again where there are fewer."""
    words, often = _counted(texts[_real(texts, padding)])
    if not len(words):
        return texts.new_zeros(count)
    return words[often.argsort(descending=True, stable=True)][torch.arange(count) % len(words)]


def _real(tokens: Tensor, padding: int | None) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding


def _counted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The different tokens, ascending, and how often each occurs."""
    words, often = torch.unique(tokens, return_counts=True)
    return words, often
