"""Metrics of claimed texts: pure functions of `example position` tokens.

Padding, the token that fills short texts up, never counts as a true token. Arguments `padding` are
that token, or None where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Token of a position for which no token is claimed."""


def are_empty(texts: Tensor, padding: int | None) -> Tensor:
    """Return `text`, whether it has only padding."""
    return ~_is_token(texts, padding).any(1)


def position_accuracy(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Return `true claimed`, the fraction of the true tokens that are claimed at their positions.

    There is a value for each pair of a true and a claimed text.

    Args:
        claimed: `claimed position`.
        true: `true position`.

    >>> position_accuracy(torch.tensor([[5, 6, 0]]), torch.tensor([[5, 7, 0]]), padding=0)
    tensor([[0.5000]])
    """
    is_token = _is_token(true, padding)
    same = (true[:, None] == claimed[None]) & is_token[:, None]
    return same.sum(2) / is_token.sum(1, keepdim=True).clamp_min(1)


def paired_position_accuracy(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Return `text`, as `position_accuracy`, of each true text with the claim in its place.

    Args:
        claimed: `text position`, in the order of the true ones, see `pair_texts`.
    """
    is_token = _is_token(true, padding)
    same = (true == claimed) & is_token
    return same.sum(1) / is_token.sum(1).clamp_min(1)


def ends_match(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Return `text`, whether no token is claimed after the end of the true text.

    Args:
        claimed: `text position`, in the order of the true ones, see `pair_texts`.
    """
    is_claimed = claimed != NO_TOKEN
    if padding is not None:
        is_claimed &= claimed != padding
    return (~is_claimed | _is_token(true, padding)).all(1)


def token_recall(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Return `true claimed`, the fraction of the true tokens that are claimed at any position.

    Texts are compared as multisets of tokens.
    """
    is_token = _is_token(true, padding)
    shares = []
    for text, selected in zip(true, is_token, strict=True):
        tokens, counts = _count_tokens(text[selected])
        claimed_counts = (claimed[:, :, None] == tokens).sum(1)
        overlap = torch.minimum(claimed_counts, counts).sum(1)
        shares.append(overlap / max(1, int(selected.sum())))
    return torch.stack(shares)


def word_recall(claimed: Tensor, true: Tensor, padding: int | None) -> float:
    """Return the fraction of the different words of all true texts that any claimed text has."""
    words, _ = _count_tokens(true[_is_token(true, padding)])
    return torch.isin(words, claimed).double().mean().item()


def text_similarities(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Return `true claimed`, the sum of position accuracy and token recall of each pair."""
    return position_accuracy(claimed, true, padding) + token_recall(claimed, true, padding)


def pair_texts(claimed: Tensor, true: Tensor, padding: int | None) -> Tensor:
    """Assign claimed texts one-to-one to the true ones; return them in the order of the true ones.

    The sum of position accuracy and token recall is largest (Hungarian algorithm). Where fewer
    texts are claimed, the others are `NO_TOKEN` at each position.
    """
    from scipy.optimize import linear_sum_assignment

    similarity = text_similarities(claimed, true, padding)
    assignment = linear_sum_assignment(similarity.numpy(), maximize=True)
    true_indices, claimed_indices = (torch.from_numpy(indices) for indices in assignment)
    assigned_texts = claimed[claimed_indices].to(true.dtype)
    return torch.full_like(true, NO_TOKEN).index_put((true_indices,), assigned_texts)


def tokens_by_position(texts: Tensor, padding: int | None) -> Tensor:
    """Return `position`, the token that most often stands there in texts that are so long; padding where none is.

    >>> tokens_by_position(torch.tensor([[5, 6, 0], [5, 0, 0], [7, 0, 0]]), padding=0)
    tensor([5, 6, 0])
    """
    frequent = []
    for column in texts.T:
        tokens = column[column != padding] if padding is not None else column
        frequent.append((tokens if len(tokens) else column).mode().values)
    return torch.stack(frequent)


def likeliest_tokens(texts: Tensor, length: int, padding: int | None) -> Tensor:
    """Return the `length` tokens, with repetitions, of which a text like these has most on average.

    The k-th copy of a token is worth the fraction of the texts that have it at least k times.

    Args:
        texts: `example position`.
    """
    words, frequencies = _count_tokens(texts[_is_token(texts, padding)])
    if not len(words):
        return texts.new_zeros(length)
    # Only the most frequent words are worth a closer look, and at most four copies of each.
    words = words[frequencies.argsort(descending=True, stable=True)[: max(200, length)]]
    counts = torch.stack([(texts == word).sum(1) for word in words])
    copies = torch.arange(1, 5)
    worth = (counts[:, None] >= copies[:, None]).double().mean(2)
    order = worth.flatten().argsort(descending=True, stable=True)
    ranked = words.repeat_interleave(len(copies))[order]
    return ranked[torch.arange(length) % len(ranked)]


def frequent_words(texts: Tensor, count: int, padding: int | None) -> Tensor:
    """Return the `count` most frequent tokens, repeated where there are fewer."""
    words, frequencies = _count_tokens(texts[_is_token(texts, padding)])
    if not len(words):
        return texts.new_zeros(count)
    ranked = words[frequencies.argsort(descending=True, stable=True)]
    return ranked[torch.arange(count) % len(ranked)]


def _is_token(tokens: Tensor, padding: int | None) -> Tensor:
    """Return which tokens are no padding."""
    if padding is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    return tokens != padding


def _count_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different tokens, ascending, and how often each occurs."""
    words, counts = torch.unique(tokens, return_counts=True)
    return words, counts
