"""Texts word by word, where each place of a transformer sees itself and those before it alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adversaries.text.attention_span import Blocks

_MOST = 4
"""Prefixes that are gone on with at most, as a multiple of the number of texts."""


class CausalSearch:
    """Extends all prefixes by all words, place by place, and keeps those whose newest word fits the second block.

    What the first block makes of a place depends on nothing behind it. Of each prefix only the newest place is
    computed: queries, keys and values of the first block are those of a word at a place, whatever the text.
    """

    def __init__(self, blocks: Blocks, texts: int) -> None:
        self._blocks, self._most = blocks, _MOST * texts
        self._vectors = blocks.vectors
        attention, inputs = blocks.block(0).attention, blocks.block(0).norm1(self._vectors)
        self._distances = blocks.spans[0].distances(inputs)
        layers = attention.query, attention.key, attention.value
        self._queries, self._keys, self._values = (
            layer(inputs).unflatten(-1, (attention.heads, -1)) for layer in layers
        )

    def texts(self, first: float, second: float, tell: Callable[[], None]) -> Tensor:
        """`text place`, all texts that no word goes on from, filled up with padding; those at the last place without.

        Args:
            first: most distance of a word at a place from the first span.
            second: most distance of the newest word from the second span.
            tell: called at each place.
        """
        length, padding = self._blocks.length, self._blocks.padding
        prefixes = torch.empty((1, 0), dtype=torch.int64)
        ended: list[Tensor] = []
        for place in range(length):
            tell()
            words = (self._distances[:, place] < first).nonzero()[:, 0]
            misfits = self._newest(prefixes, words)
            fits = misfits < second
            if padding is not None and place:
                ended.append(prefixes[~fits.any(1)])
            order = misfits.flatten().argsort()[: min(self._most, int(fits.sum()))]
            before, chosen = order // max(1, len(words)), order % max(1, len(words))
            prefixes = torch.cat([prefixes[before], words[chosen][:, None]], 1)
            if not len(prefixes):
                break
        ended.append(prefixes if prefixes.shape[1] == length else prefixes[:0])
        rows = [text for some in ended for text in some]
        claimed = torch.full((len(rows), length), padding or 0)
        for row, text in zip(claimed, rows, strict=True):
            row[: len(text)] = self._blocks.words[text]
        return claimed

    def _newest(self, prefixes: Tensor, words: Tensor) -> Tensor:
        """`prefix word`: distance from the second span where the word comes next."""
        place, block = prefixes.shape[1], self._blocks.block(0)
        queries, own = self._queries[words, place], self._keys[words, place]
        found = []
        for prefix in prefixes:
            before = torch.arange(place)
            keys, values = self._keys[prefix, before], self._values[prefix, before]
            closeness = torch.cat(
                [torch.einsum("whd,phd->whp", queries, keys), (queries * own).sum(-1, keepdim=True)], 2
            )
            weights = (closeness / queries.shape[-1] ** 0.5).softmax(-1)
            mixed = torch.einsum("whp,phd->whd", weights[..., :-1], values)
            mixed = mixed + weights[..., -1:] * self._values[words, place]
            states = self._vectors[words, place] + block.attention.output(mixed.flatten(1))
            states = states + block.perceptron(block.norm2(states))
            found.append(self._blocks.spans[1].distances(self._blocks.block(1).norm1(states)))
        return torch.stack(found)
