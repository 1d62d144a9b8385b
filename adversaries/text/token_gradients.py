"""Token gradients: correction of guessed texts by the rows of the embedding's gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.text.attention_blocks import AttentionBlocks

_MAX_STEPS = 12
_POSITION_FLOOR, _FIT_FLOOR = 0.05, 0.02
"""Added to a word's position score and fit, so that neither factor excludes a word."""


@dataclass(frozen=True)
class Guess:
    """A text, with scores of all words by the text's gradient.

    Attributes:
        text: `position`, padded to full length.
        word_scores: `word position`, how well the word's row fits the text's gradient at the position.
        fit: mean fit of the text's own words, at most 1, which a correct text reaches if it shares
            no word with other texts.
    """

    text: Tensor
    word_scores: Tensor
    fit: float


class TokenGradients:
    """Compares the embedding's rows of a message with the gradients that a guessed text would have.

    A word's row in the embedding's gradient is the sum of the gradients at its positions. So in a
    correct text the gradient at each position equals its word's row, if the word occurs nowhere
    else. A text with some wrong words has similar gradients, which identify the right words.
    """

    def __init__(self, blocks: AttentionBlocks, position_scores: Tensor) -> None:
        self._blocks, self._position_scores = blocks, position_scores
        self._rows = blocks.states.direction("embedding.weight", torch.float64)[blocks.words]
        self._row_norms = self._rows.norm(dim=1)

    def refine_guess(self, word_indices: Tensor, min_words: int) -> list[Guess]:
        """Replace words by the best fitting ones repeatedly; return all guesses, best first.

        Args:
            word_indices: `position`, words to begin with.
            min_words: least number of words of the text; with padding all lengths from it on are
                tried.
        """
        length, padded = self._blocks.length, self._blocks.padding is not None
        lengths: Iterable[int] = range(min_words, length + 1) if padded else (length,)
        initial_indices = word_indices
        guesses: dict[tuple[int, ...], Guess] = {}
        for _ in range(_MAX_STEPS):
            guess, num_words = self._score_words(word_indices, torch.tensor(list(lengths)))
            if (text := tuple(guess.text.tolist())) in guesses:
                break
            guesses[text] = guess
            is_word = torch.arange(length) < num_words
            word_indices = torch.where(is_word, guess.word_scores.argmax(0), initial_indices)
            if padded:
                lengths = range(max(1, num_words - 1), min(length, num_words + 1) + 1)
        return sorted(guesses.values(), key=lambda guess: -guess.fit)

    def _score_words(self, word_indices: Tensor, lengths: Tensor) -> tuple[Guess, int]:
        """Return the guess with the best fitting length and class, and its number of words."""
        blocks, positions = self._blocks, torch.arange(self._blocks.length)
        is_word = positions < lengths[:, None]
        texts = blocks.words[word_indices].expand(len(lengths), -1)
        if blocks.padding is not None:
            texts = torch.where(is_word, texts, blocks.padding)

        # Compute the gradients of each length and class.
        gradients = self._input_gradients(texts)
        rows = self._rows[word_indices]
        if blocks.states.gradient is None:  # an update is an unknown multiple of the gradient
            tiny = torch.finfo(rows.dtype).tiny
            scale = (rows * gradients).sum((2, 3)) / gradients.square().sum((2, 3)).clamp_min(tiny)
            gradients = gradients * scale.clamp_min(0)[..., None, None]

        # Choose the length and class that fit the words' rows best.
        word_fits = (rows * gradients).sum(3) / _larger_squared_norm(self._row_norms[word_indices], gradients)
        fits = (word_fits * is_word[:, None]).sum(2) / lengths[:, None]
        best, label = divmod(int(fits.argmax()), fits.shape[1])
        gradient = gradients[best, label]

        # Score all words by the gradient of that choice.
        all_fits = self._rows @ gradient.T / _larger_squared_norm(self._row_norms[:, None], gradient)
        word_scores = (all_fits.clamp_min(0) + _FIT_FLOOR) * (self._position_scores + _POSITION_FLOOR)
        return Guess(texts[best], word_scores, float(fits[best, label])), int(lengths[best])

    def _input_gradients(self, texts: Tensor) -> Tensor:
        """Return the loss gradient at each embedded word for each class, divided by N.

        Returns:
            `text class position dim`.
        """
        blocks = self._blocks
        num_classes = blocks.model.linear.out_features
        with torch.enable_grad():
            embedded = blocks.model.embedding(texts).repeat_interleave(num_classes, 0).requires_grad_(True)
            losses = []
            for index, logits in enumerate(blocks.model(embedded)):
                losses.append(blocks.loss(logits[None], torch.tensor([index % num_classes])))
            (gradients,) = torch.autograd.grad(torch.stack(losses).sum(), embedded)
        scaled: Tensor = gradients.unflatten(0, (-1, num_classes)) / blocks.num_texts
        return scaled


def _larger_squared_norm(row_norms: Tensor, gradients: Tensor) -> Tensor:
    """Return the square of the larger norm, of a word's row or of a gradient."""
    larger = torch.maximum(row_norms, gradients.norm(dim=-1))
    return larger.square().clamp_min(torch.finfo(gradients.dtype).tiny)
