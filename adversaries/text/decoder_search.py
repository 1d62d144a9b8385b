"""Search for a decoder's texts, word by word, as causal attention allows (DAGER)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adversaries.text.attention_blocks import AttentionBlocks

_PREFIXES_PER_TEXT = 4
"""Most prefixes kept at each position, as a multiple of the number of texts."""


class DecoderSearch:
    """Extends prefixes word by word and keeps those whose last word fits the second span.

    The output of the first block at a position does not depend on later positions, so only the last
    position of each prefix is computed. The queries, keys and values of the first block depend on
    the word and its position only, and are computed once.
    """

    def __init__(self, blocks: AttentionBlocks, texts: int) -> None:
        self._blocks, self._max_prefixes = blocks, _PREFIXES_PER_TEXT * texts
        self._vectors = blocks.first_block_inputs
        attention, inputs = blocks.block(0).attention, blocks.block(0).norm1(self._vectors)
        self._distances = blocks.spans[0].distances(inputs)
        layers = attention.query, attention.key, attention.value
        self._queries, self._keys, self._values = (
            layer(inputs).unflatten(-1, (attention.heads, -1)) for layer in layers
        )

    def find_texts(self, first: float, second: float, report: Callable[[], None]) -> Tensor:
        """Return all texts that no word extends, padded to full length, `text position`.

        Args:
            first: largest distance of a word at a position from the first span.
            second: largest distance of the last word from the second span.
            report: called at each position.
        """
        length, padding = self._blocks.length, self._blocks.padding
        prefixes = torch.empty((1, 0), dtype=torch.int64)
        complete: list[Tensor] = []
        for position in range(length):
            report()
            words = (self._distances[:, position] < first).nonzero()[:, 0]
            distances = self._last_word_distances(prefixes, words)
            fits = distances < second

            # A prefix that no word extends is a text.
            if padding is not None and position:
                complete.append(prefixes[~fits.any(1)])

            # Keep the best extensions.
            order = distances.flatten().argsort()[: min(self._max_prefixes, int(fits.sum()))]
            prefix_indices, word_indices = order // max(1, len(words)), order % max(1, len(words))
            prefixes = torch.cat([prefixes[prefix_indices], words[word_indices][:, None]], 1)
            if not len(prefixes):
                break
        complete.append(prefixes if prefixes.shape[1] == length else prefixes[:0])

        rows = [text for texts in complete for text in texts]
        tokens = torch.full((len(rows), length), padding or 0)
        for row, text in zip(tokens, rows, strict=True):
            row[: len(text)] = self._blocks.words[text]
        return tokens

    def rank_texts(self, beam: int, num_kept: int, report: Callable[[float], None]) -> list[Tensor]:
        """Return for each length the texts nearest to both spans, nearest first.

        Args:
            beam: number of prefixes that are kept at each position.
            num_kept: number of texts of each length that are returned.
            report: called at each position with the mean squared distance of the best prefix's words.

        Returns:
            `text position` for each number of words, ascending; without padding only for the full one.
        """
        length, padding = self._blocks.length, self._blocks.padding
        prefixes = torch.empty((1, 0), dtype=torch.int64)
        texts = list[Tensor]()
        scores = torch.zeros(1, dtype=self._distances.dtype)
        words = torch.arange(len(self._blocks.words))
        for position in range(length):
            squares = self._last_word_distances(prefixes, words).square() + self._distances[:, position].square()
            totals = (scores[:, None] + squares).flatten()
            order = totals.argsort()[:beam]
            prefixes = torch.cat([prefixes[order // len(words)], words[order % len(words)][:, None]], 1)
            scores = totals[order]
            report(float(scores[0]) / (2 * (position + 1)))
            if padding is not None or position == length - 1:
                best = self._blocks.words[prefixes[:num_kept]]
                rest = torch.full((len(best), length - position - 1), padding or 0)
                texts.append(torch.cat([best, rest], 1))
        return texts

    def _last_word_distances(self, prefixes: Tensor, words: Tensor) -> Tensor:
        """Return the distances of words from the second span as the next word, `prefix word`."""
        position, block = prefixes.shape[1], self._blocks.block(0)
        queries, word_keys = self._queries[words, position], self._keys[words, position]
        distances = []
        for prefix in prefixes:
            # Attend to the prefix and to the word itself.
            positions = torch.arange(position)
            keys, values = self._keys[prefix, positions], self._values[prefix, positions]
            prefix_scores = torch.einsum("whd,phd->whp", queries, keys)
            scores = torch.cat([prefix_scores, (queries * word_keys).sum(-1, keepdim=True)], 2)
            weights = (scores / queries.shape[-1] ** 0.5).softmax(-1)
            mixed = torch.einsum("whp,phd->whd", weights[..., :-1], values)
            mixed = mixed + weights[..., -1:] * self._values[words, position]

            # Apply the rest of the first block.
            states = self._vectors[words, position] + block.attention.output(mixed.flatten(1))
            states = states + block.perceptron(block.norm2(states))
            distances.append(self._blocks.spans[1].distances(self._blocks.block(1).norm1(states)))
        return torch.stack(distances)
