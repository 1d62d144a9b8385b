"""Search for an encoder's texts by pairs of word and position, where the embedding has no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adversaries.text.attention_blocks import AttentionBlocks
from adversaries.text.word_exchange import change_one_word

_BEAM_WIDTH, _MAX_STEPS = 8, 40
_CHOICES_PER_POSITION = 8
"""Words that are tried at each position, at least; N where that is more."""


def find_paired_texts(
    blocks: AttentionBlocks, max_misfit: float, attempts: int, report: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Search for the client's texts from pairs of a word and a position whose inputs are near the first span.

    The embedding, whose rows would name words and tell texts apart, is frozen or was not sent, as with adapters
    alone. But the gradient of the first block is a sum of outer products of its inputs with one vector for each word
    at a position, and least squares yields these vectors. Those of the words of a text are alike, as its positions
    attend to each other. So each pair is a start: its text has at each position the word whose vector is most like
    its own. A beam search then changes single words by the distance from the second span.

    Args:
        blocks: of an encoder.
        max_misfit: misfit below which a text is found; with 0 none is, and all are candidates.
        attempts: most starts.
        report: called after each start with the number of texts found.

    Returns:
        All texts that beams ended in, nearest first, `text position`; and which of them are found, `text`.
    """
    words, similarities, norms = _find_pairs(blocks)
    fast, misfits = blocks.to_float32(), dict[tuple[int, ...], float]()
    is_open = norms > 0
    for _ in range(attempts):
        # Start from the pair with the largest gradient that no text explains.
        start = int(torch.where(is_open, norms, -1.0).argmax())
        is_open[start] = False
        beam = _improve_texts(fast, _start_texts(blocks, words, similarities[start], start), words, max_misfit)
        is_new = tuple(beam[0].tolist()) not in misfits
        for text, misfit in zip(beam, blocks.misfits(beam).tolist(), strict=True):
            misfits.setdefault(tuple(text.tolist()), misfit)
        if not max_misfit or not is_new or misfits[tuple(beam[0].tolist())] < max_misfit:
            is_open &= (words != beam[0]).flatten()
        num_found = sum(misfit < max_misfit for misfit in misfits.values())
        report(num_found)
        if num_found >= blocks.num_texts or not is_open.any():
            break
    texts = sorted(misfits, key=misfits.__getitem__)
    return torch.tensor(texts), torch.tensor([misfits[text] < max_misfit for text in texts])


def _find_pairs(blocks: AttentionBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the words nearest to the first span at each position, how alike their gradients are, and their norms.

    Returns:
        `choice position` tokens, ascending in distance; `pair pair` cosines and `pair` norms, of pairs in the order of
        the flattened tokens.
    """
    num_choices = min(max(blocks.num_texts, _CHOICES_PER_POSITION), len(blocks.words))
    nearest = blocks.first_span_distances().topk(num_choices, dim=0, largest=False).indices
    likely = nearest[: blocks.num_texts]
    positions = torch.arange(blocks.length).expand_as(likely)
    inputs = blocks.block(0).norm1(blocks.first_block_inputs[likely.flatten(), positions.flatten()])
    span = blocks.spans[0]
    features = inputs if span.projection is None else inputs @ span.projection.T
    # Only as many pairs as there are words can be told apart; what else is tried begins as unlike all.
    vectors = torch.zeros(nearest.numel(), span.gradient.shape[0], dtype=features.dtype)
    solution = torch.linalg.lstsq(features.T, span.gradient.T, driver="gelsd").solution
    vectors[: len(solution)] = solution
    if span.projection is None:
        vectors = vectors.chunk(3, 1)[2]  # those of the values
    directions = normalize(vectors, dim=1)
    return blocks.words[nearest], directions @ directions.T, vectors.norm(dim=1)


def _start_texts(blocks: AttentionBlocks, words: Tensor, similarities: Tensor, start: int) -> Tensor:
    """Return texts through one pair, of each length that holds it, `text position`."""
    num_words, length = words.shape
    scores = similarities.clone()
    scores[start] = 2.0
    text = words.gather(0, scores.view(num_words, length).argmax(0, keepdim=True))[0]
    if blocks.padding is None:
        return text[None]
    lengths = torch.arange(start % length + 1, length + 1)
    return torch.where(torch.arange(length) < lengths[:, None], text, blocks.padding)


def _improve_texts(blocks: AttentionBlocks, beam: Tensor, words: Tensor, max_misfit: float) -> Tensor:
    """Change one word at a time, or the end, as long as that lowers the misfit; return the last beam, best first."""
    lowest = float("inf")
    for _ in range(_MAX_STEPS):
        pool = torch.unique(torch.cat([beam, *(change_one_word(text, words, blocks.padding) for text in beam)]), dim=0)
        misfits = blocks.misfits(pool)
        order = misfits.argsort()[:_BEAM_WIDTH]
        beam, misfit = pool[order], float(misfits[order[0]])
        if misfit < max_misfit or misfit >= lowest:
            break
        lowest = misfit
    return beam
