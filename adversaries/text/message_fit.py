"""Choice and correction of texts by how well their gradients fit a noised message."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor

from adversaries.text.attention_span import AttentionBlocks
from adversaries.text.word_exchange import exchange_words

_EXTRA_CLASSES = 1
"""Classes that are tried beyond those that the last layer's bias points at."""
_WORDS_PER_POSITION = 4
"""Words that are tried at each position of a text."""
_MAX_SWEEPS = 3
_CACHED_GRADIENTS = 32
"""Gradients that are kept, since a change of one text leaves those of the others."""
_LEAST_GAIN = 1 + 1e-5
"""Factor by which a change has to improve the fit; a smaller gain is rounding."""


class MessageFit:
    """Compares the gradients of guessed texts with all that a client sent.

    A message is a sum of the texts' gradients, each times an unknown scale (1 / N of a mean; smaller
    where a defense clips), plus noise. If noise is white, the likeliest texts are those whose
    gradients, times the best scales, leave least of the message. All parameters count, so noise is
    averaged over far more numbers than in a span.

    Attributes:
        num_numbers: of the message that are compared. Of the embedding these are the rows of the
            candidate words.
    """

    def __init__(self, blocks: AttentionBlocks) -> None:
        self._blocks = blocks
        self._model = deepcopy(blocks.model).float().requires_grad_(True)
        # Leave out layers that were not sent.
        sent = {n: p for n, p in self._model.named_parameters() if blocks.states.direction(n).any()}
        self._sends_embedding = sent.pop("embedding.weight", None) is not None
        self._parameters = list(sent.values())
        parts = [blocks.states.direction(name, torch.float32) for name in sent]
        if self._sends_embedding:
            parts.append(blocks.states.direction("embedding.weight", torch.float32)[blocks.words])
        self._message = torch.cat([part.flatten() for part in parts])
        self.num_numbers = len(self._message)
        self._cache: dict[tuple[int, ...], Tensor] = {}
        # With the cross-entropy, only classes that a text has lower the gradient of their bias below 0.
        bias = blocks.states.direction("linear.bias")
        num_classes = min(int((bias < 0).sum()), blocks.num_texts) + _EXTRA_CLASSES
        self._classes: list[int] = bias.argsort()[:num_classes].tolist()

    def select_texts(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Choose up to N texts one after the other, each the one that fits best what the others leave.

        Args:
            pool: `candidate position`, at least one.

        Returns:
            Texts, `text position`, and their classes, `text`.
        """
        choices = [(text, label) for text in pool.unique(dim=0) for label in self._classes]
        gradients = torch.empty(len(choices), self.num_numbers)
        for row, (text, label) in zip(gradients, choices, strict=True):
            row[:] = self._text_gradient(text, label)
        norms = gradients.norm(dim=1)
        chosen: list[int] = []
        remainder = self._message
        for _ in range(min(self._blocks.num_texts, len(choices))):
            fits = gradients @ remainder / norms
            best = int(fits.argmax())
            if not fits[best] > 0:
                break
            chosen.append(best)
            remainder = self._remainder(gradients[chosen])
        texts, labels = zip(*(choices[index] for index in chosen), strict=True)
        return torch.stack(texts), torch.tensor(labels)

    def refine_texts(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Make single changes of texts that improve the fit, until none does.

        A change is another class, two words of a text swapped, an end, or another word; and words
        exchanged between texts of one class. The text that was chosen last is changed first: it is
        the likeliest to be wrong, and what is missing should not go into one that is right.

        Args:
            tokens: `text position`.
            labels: `text`, the classes.

        Returns:
            Texts and classes, as the arguments.
        """
        tokens, labels = tokens.clone(), labels.clone()
        for _ in range(_MAX_SWEEPS):
            is_changed = [self._refine_text(tokens, labels, index) for index in range(len(tokens) - 1, -1, -1)]
            exchanged, _ = exchange_words(tokens, labels, lambda texts: self.unexplained_share(texts, labels), 1)
            if not any(is_changed) and torch.equal(exchanged, tokens):
                break
            tokens = exchanged
        return tokens, labels

    def unexplained_share(self, tokens: Tensor, labels: Tensor) -> float:
        """Return the share of the message's norm that texts leave, each times its best scale."""
        return float(self._remainder(self._text_gradients(tokens, labels)).norm() / self._message.norm())

    def noise_share(self, deviation: float) -> float:
        """Return the share of the message's norm that noise of this standard deviation has."""
        return float(deviation * self.num_numbers**0.5 / self._message.norm())

    def _refine_text(self, tokens: Tensor, labels: Tensor, index: int) -> bool:
        """Change one text in place as long as its fit to what the others leave improves."""
        gradients = self._text_gradients(tokens, labels)
        others = torch.arange(len(tokens)) != index
        remainder = self._remainder(gradients, others)
        best = _fit(remainder, gradients[index])
        is_changed = False
        for text, label in self._changes(tokens[index].clone(), int(labels[index]), remainder):
            fit = _fit(remainder, self._text_gradient(text, label))
            if fit > best * _LEAST_GAIN:
                best, is_changed = fit, True
                tokens[index], labels[index] = text, label
        return is_changed

    def _changes(self, text: Tensor, label: int, remainder: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the texts and classes that differ from a text in one change."""
        padding, length = self._blocks.padding, len(text)
        num_words = length if padding is None else int((text != padding).sum())
        for other_label in self._classes:
            if other_label != label:
                yield text, other_label
        for first in range(num_words):
            for second in range(first):
                if text[first] != text[second]:
                    swapped = text.clone()
                    swapped[first], swapped[second] = text[second], text[first]
                    yield swapped, label
        if padding is not None:
            for end in range(1, num_words):
                yield torch.where(torch.arange(length) < end, text, padding), label
        for position, words in enumerate(self._likely_words(text, label, remainder)[: num_words + 1]):
            for word in words:
                changed = text.clone()
                changed[position] = word
                yield changed, label

    def _likely_words(self, text: Tensor, label: int, remainder: Tensor) -> Tensor:
        """Return words whose rows of the embedding's gradient fit a position's, or by the span, `position word`."""
        words = self._blocks.words
        num_words = min(_WORDS_PER_POSITION, len(words))
        if not self._sends_embedding:
            return words[self._blocks.first_span_distances().topk(num_words, dim=0, largest=False).indices.T]
        rows = remainder[-len(words) * self._model.embedding.embedding_dim :].view(len(words), -1)
        if self._blocks.padding is not None and (is_padding := text == self._blocks.padding).any():
            # The first position without a word has no gradient, so put one there.
            end = int(is_padding.long().argmax())
            text = text.clone()
            text[end] = text[end - 1]
        _, gradients = self._differentiate(text, label)
        scale = rows.norm(dim=1).max() / gradients.norm(dim=1).max()
        tiny = torch.finfo(rows.dtype).tiny
        larger = torch.maximum(rows.norm(dim=1)[:, None], scale * gradients.norm(dim=1)).clamp_min(tiny)
        return words[(rows @ gradients.T / larger).topk(num_words, dim=0).indices.T]

    def _remainder(self, gradients: Tensor, is_counted: Tensor | None = None) -> Tensor:
        """Return the message less the gradients, `text number`, each times the scale that leaves least.

        Args:
            gradients: of all texts, whose scales are found together.
            is_counted: `text`, whose gradients are subtracted; None subtracts all.
        """
        products = gradients @ gradients.T
        scales = torch.linalg.lstsq(products.double(), (gradients @ self._message).double()[:, None]).solution[:, 0]
        scales = scales.clamp_min(0).float()
        if is_counted is not None:
            scales = scales * is_counted
        return self._message - scales @ gradients

    def _text_gradients(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the gradients of texts, `text number`."""
        return torch.stack([self._text_gradient(t, int(label)) for t, label in zip(tokens, labels, strict=True)])

    def _text_gradient(self, text: Tensor, label: int) -> Tensor:
        """Return the gradient of one text, in the order of the message."""
        key = (label, *text.tolist())
        if key not in self._cache:
            gradients, embedded = self._differentiate(text, label)
            if self._sends_embedding:
                rows = torch.zeros(len(self._blocks.words), embedded.shape[1])
                is_word = torch.isin(text, self._blocks.words)
                rows.index_add_(0, torch.searchsorted(self._blocks.words, text[is_word]), embedded[is_word])
                gradients.append(rows)
            if len(self._cache) == _CACHED_GRADIENTS:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = torch.cat([gradient.flatten() for gradient in gradients])
        return self._cache[key]

    def _differentiate(self, text: Tensor, label: int) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of the parameters but the embedding, and of the embedded words, `position dim`."""
        with torch.enable_grad():
            embedded = self._model.embedding(text[None]).detach().requires_grad_(True)
            loss = self._blocks.loss(self._model(embedded), torch.tensor([label]))
            *gradients, at_words = torch.autograd.grad(loss, [*self._parameters, embedded])
        return gradients, at_words[0]


def _fit(remainder: Tensor, gradient: Tensor) -> float:
    """Return the length of the projection of a remainder on the direction of a gradient."""
    return float(remainder @ gradient / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny))
