"""Which words a guessed text asks for: by the gradient that it would have itself, beside that of each word."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.text.attention_span import Blocks

_TURNS = 12
_UNLIKELY, _UNFIT = 0.05, 0.02
"""What is added to how likely a word is at a place, and to how well it fits, so that neither rules a word out."""


@dataclass(frozen=True)
class Guess:
    """A text, and what its own gradient says of all words.

    Attributes:
        text: `place`, filled up with padding.
        likely: `word place`, how well the word's gradient fits what the text asks for at the place.
        fit: of its own words, their mean, at most 1: that of a text that is right, and shares no word with others.
    """

    text: Tensor
    likely: Tensor
    fit: float


class Slopes:
    """The gradients of words' vectors, and those that a text would have, which say how far it is right.

    The row of a word in the gradient of the embedding is the sum of the slopes of its places. So in a text that is
    right, each place has the slope of its word's row, where that word occurs nowhere else. A text with some wrong words
    asks for nearly the same, which names the right ones.
    """

    def __init__(self, blocks: Blocks, places: Tensor) -> None:
        self._blocks, self._places = blocks, places
        self._rows = blocks.states.direction("embedding.weight", torch.float64)[blocks.words]
        self._sizes = self._rows.norm(dim=1)

    def guesses(self, at: Tensor, least: int) -> list[Guess]:
        """Those that follow from one another, the one that fits best first: words are set to those that are asked for.

        Args:
            at: `place`, words to begin with.
            least: words that the text has at least; where texts are filled up, all lengths from there on are tried.
        """
        length, padded = self._blocks.length, self._blocks.padding is not None
        lengths: Iterable[int] = range(least, length + 1) if padded else (length,)
        first, found = at, dict[tuple[int, ...], Guess]()
        for _ in range(_TURNS):
            guess, held = self._read(at, torch.tensor(list(lengths)))
            if (name := tuple(guess.text.tolist())) in found:
                break
            found[name] = guess
            at = torch.where(torch.arange(length) < held, guess.likely.argmax(0), first)
            lengths = range(max(1, held - 1), min(length, held + 1) + 1) if padded else lengths
        return sorted(found.values(), key=lambda guess: -guess.fit)

    def _read(self, at: Tensor, lengths: Tensor) -> tuple[Guess, int]:
        """The length and class with which these words fit best, and how many words it has."""
        blocks, places = self._blocks, torch.arange(self._blocks.length)
        held = places < lengths[:, None]
        texts = blocks.words[at].expand(len(lengths), -1)
        if blocks.padding is not None:
            texts = torch.where(held, texts, blocks.padding)
        slopes = self._of(texts)
        rows = self._rows[at]
        if blocks.states.gradient is None:  # weights move by an unknown multiple
            moved = (rows * slopes).sum((2, 3)) / slopes.square().sum((2, 3)).clamp_min(torch.finfo(rows.dtype).tiny)
            slopes = slopes * moved.clamp_min(0)[..., None, None]
        fits = ((rows * slopes).sum(3) / _larger(self._sizes[at], slopes) * held[:, None]).sum(2) / lengths[:, None]
        best, label = divmod(int(fits.argmax()), fits.shape[1])
        chosen = slopes[best, label]
        likely = (self._rows @ chosen.T / _larger(self._sizes[:, None], chosen)).clamp_min(0) + _UNFIT
        guess = Guess(texts[best], likely * (self._places + _UNLIKELY), float(fits[best, label]))
        return guess, int(lengths[best])

    def _of(self, texts: Tensor) -> Tensor:
        """`text class place dim`: the slope of the loss at the vector of each place, as a message of N texts has it."""
        blocks = self._blocks
        classes = blocks.model.linear.out_features
        with torch.enable_grad():
            embedded = blocks.model.embedding(texts).repeat_interleave(classes, 0).requires_grad_(True)
            outputs = blocks.model(embedded)
            losses = [blocks.loss(row[None], torch.tensor([place % classes])) for place, row in enumerate(outputs)]
            (slopes,) = torch.autograd.grad(torch.stack(losses).sum(), embedded)
        found: Tensor = slopes.unflatten(0, (-1, classes)) / blocks.texts
        return found


def _larger(sizes: Tensor, slopes: Tensor) -> Tensor:
    """The square of the larger length, of a word's row or of a slope."""
    return torch.maximum(sizes, slopes.norm(dim=-1)).square().clamp_min(torch.finfo(slopes.dtype).tiny)
