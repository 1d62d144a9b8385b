"""Choice and correction of texts by how well their gradients fit a noised message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from adversaries.text.attention_blocks import AttentionBlocks
from adversaries.text.word_exchange import exchange_words

_LEAST_CLASSES = 10
"""Classes that are tried at least; more where there are more texts, one beyond N."""
_WORDS_PER_POSITION = 4
"""Words that are tried at each position of a text."""
_MAX_SWEEPS = 3
_CHANGES_PER_WORD = 2
"""Most changes in all, as a multiple of the number of words."""
_SAMPLED_NUMBERS = 1 << 17
"""Numbers of a message that are compared, beside the embedding's, to bound memory and time."""
_KEPT_NUMBERS = 1 << 28
"""Numbers of gradients that are kept at once, 1 GiB, to bound memory."""
_LEAST_GAIN = 1e-5
"""Share of the message's square by which a change has to improve the fit; a smaller gain is rounding."""


class MessageFit:
    """Compares the gradients of guessed texts with all that a client sent.

    A message is a sum of the texts' gradients, each times an unknown scale (1 / N of a mean; smaller
    where a defense clips), plus noise. If noise is white, the likeliest texts are those whose
    gradients, times the best scales, leave least of the message. All parameters count, so noise is
    averaged over far more numbers than in a span. Of a large model a regular sample is compared, and
    of the embedding the rows of the candidate words.
    """

    def __init__(self, blocks: AttentionBlocks) -> None:
        self._blocks = blocks
        self._model = deepcopy(blocks.model).float().requires_grad_(True)
        # Leave out layers that were not sent.
        sent = {n: p for n, p in self._model.named_parameters() if blocks.states.direction(n).any()}
        self._sends_embedding = sent.pop("embedding.weight", None) is not None
        self._parameters = list(sent.values())
        # An odd stride meets every column of the matrices, whose sides are even.
        self._stride = sum(p.numel() for p in self._parameters) // _SAMPLED_NUMBERS | 1
        parts = [blocks.states.direction(name, torch.float32) for name in sent]
        rows = (
            blocks.states.direction("embedding.weight", torch.float32)[blocks.words] if self._sends_embedding else None
        )
        self._message = self._sample_numbers(parts, rows)

        # With the cross-entropy, the bias of a class has the mean of its probability less the share of its texts as
        # gradient. That is above 0 too where the model expects the class more often than texts have it, so a positive
        # one excludes no class.
        bias = blocks.states.direction("linear.bias")
        num_classes = max(blocks.num_texts + 1, _LEAST_CLASSES) if bias.any() else len(bias)
        self._classes: list[int] = bias.argsort()[:num_classes].tolist()
        self._max_choices = max(_KEPT_NUMBERS // len(self._message), 2 * blocks.num_texts)

    def select_texts(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Choose up to N texts so that each is the one that fits best what the others leave.

        Args:
            pool: `candidate position`, at least one.

        Returns:
            Texts, `text position`, and their classes, `text`.
        """
        choices = [(text, label) for text in torch.unique(pool, dim=0) for label in self._classes]
        choices, gradients = self._find_best_choices(choices, _rows(self._message[None], []), self._max_choices)

        # Add one after the other, then choose each anew until none changes.
        chosen: list[int] = []
        for _ in range(min(self._blocks.num_texts, len(choices))):
            chosen.append(int(self._fits(gradients, _rows(gradients, chosen)).argmax()))
        for _ in range(_MAX_SWEEPS):
            before = list(chosen)
            for index in range(len(chosen)):
                others = chosen[:index] + chosen[index + 1 :]
                chosen[index] = int(self._fits(gradients, _rows(gradients, others)).argmax())
            if chosen == before:
                break
        texts, labels = zip(*(choices[index] for index in dict.fromkeys(chosen)), strict=True)
        return torch.stack(texts), torch.tensor(labels)

    def refine_texts(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Change texts as long as that improves the fit; return texts and classes.

        A change is another class, two words of a text swapped, an end, or another word; of all texts
        the best change is made first, since a wrong text draws others to what it lacks. In the end
        words are exchanged between texts of one class.
        """
        for _ in range(_MAX_SWEEPS):
            tokens, labels = self._change_texts(tokens.clone(), labels.clone())
            exchanged, _ = exchange_words(tokens, labels, partial(self.unexplained_share, labels=labels), 1)
            if torch.equal(exchanged, tokens):
                break
            tokens = exchanged
        return tokens, labels

    def unexplained_share(self, tokens: Tensor, labels: Tensor) -> float:
        """Return the share of the message's norm that texts leave, each times its best scale."""
        gradients = self._gradients(list(zip(tokens, labels.tolist(), strict=True)))
        return float(self._remainder(gradients).norm() / self._message.norm())

    def explained_shares(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the share of the message's norm that each text explains beyond the others, `text`."""
        gradients = self._gradients(list(zip(tokens, labels.tolist(), strict=True)))
        fits = []
        for index in range(len(tokens)):
            others = [other for other in range(len(tokens)) if other != index]
            fits.append(self._fits(gradients[[index]], _rows(gradients, others)))
        shares: Tensor = torch.cat(fits) / self._message.norm()
        return shares

    def share_by_chance(self, deviation: float) -> float:
        """Return the share of the message's norm that no text explains of noise alone, not even the best of all.

        The largest of M standard normal numbers is about sqrt(2 ln M), here of all texts and classes.
        """
        log_texts = self._blocks.length * math.log(len(self._blocks.words)) + math.log(len(self._classes))
        return float(deviation * math.sqrt(2 * log_texts) / self._message.norm())

    def noise_share(self, deviation: float) -> float:
        """Return the share of the message's norm that noise of this standard deviation has."""
        return float(deviation * len(self._message) ** 0.5 / self._message.norm())

    def _change_texts(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Make the best change of all texts again and again, in place."""
        gradients = self._gradients(list(zip(tokens, labels.tolist(), strict=True)))
        changes: dict[int, tuple[list[tuple[Tensor, int]], Tensor]] = {}
        is_fresh = True
        for _ in range(_CHANGES_PER_WORD * tokens.numel()):
            best_gain, best_text, best_change = _LEAST_GAIN * float(self._message.square().sum()), -1, -1
            for index in range(len(tokens)):
                others = [other for other in range(len(tokens)) if other != index]
                if index not in changes:
                    remainder = self._remainder(gradients)
                    choices = list(self._changes(tokens[index].clone(), int(labels[index]), remainder))
                    most = self._max_choices // len(tokens)
                    changes[index] = self._find_best_choices(choices, _rows(gradients, others), most)
                fits = self._fits(torch.cat([gradients[[index]], changes[index][1]]), _rows(gradients, others))
                squares = fits.clamp_min(0).square()
                gain = float(squares[1:].max() - squares[0])
                if gain > best_gain:
                    best_gain, best_text, best_change = gain, index, int(squares[1:].argmax())
            if best_text < 0:
                if is_fresh:
                    break
                # What the others leave has changed, and so have the likely words.
                changes, is_fresh = {}, True
                continue
            choices, of_choices = changes.pop(best_text)
            tokens[best_text], labels[best_text] = choices[best_change]
            gradients[best_text] = of_choices[best_change]
            is_fresh = False
        return tokens, labels

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

    def _find_best_choices(
        self, choices: list[tuple[Tensor, int]], others: Tensor, most: int
    ) -> tuple[list[tuple[Tensor, int]], Tensor]:
        """Return at most so many texts with classes, those that fit best beyond others, and their gradients."""
        kept, gradients = list[tuple[Tensor, int]](), torch.empty(0, len(self._message))
        for start in range(0, len(choices), most):
            added = choices[start : start + most]
            kept, gradients = kept + added, torch.cat([gradients, self._gradients(added)])
            if len(kept) > most:
                best = self._fits(gradients, others).topk(most).indices.sort().values
                kept, gradients = [kept[index] for index in best.tolist()], gradients[best]
        return kept, gradients

    def _fits(self, gradients: Tensor, others: Tensor) -> Tensor:
        """Return how much of the message's norm each gradient explains beyond others, below 0 with a negative scale.

        Args:
            gradients: `choice number`.
            others: `text number`, whose scales are found anew with each choice.
        """
        basis, _ = torch.linalg.qr(others.T)
        remainder = self._message - basis @ (basis.T @ self._message)
        squares = torch.linalg.vector_norm(gradients, dim=1).square()  # makes no second matrix
        beyond = squares - (gradients @ basis).square().sum(1)
        fits: Tensor = gradients @ remainder / beyond.clamp_min(_LEAST_GAIN * squares.max()).sqrt()
        return fits

    def _remainder(self, gradients: Tensor) -> Tensor:
        """Return the message less the gradients, `text number`, each times the scale that leaves least."""
        products = (gradients @ gradients.T).double()
        scales = torch.linalg.lstsq(products, (gradients @ self._message).double()[:, None]).solution[:, 0]
        remainder: Tensor = self._message - scales.clamp_min(0).float() @ gradients
        return remainder

    def _gradients(self, choices: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the gradients of texts with classes, in the order of the message, `choice number`."""
        gradients, words = torch.empty(len(choices), len(self._message)), self._blocks.words
        for gradient, (text, label) in zip(gradients, choices, strict=True):
            parts, embedded = self._differentiate(text, label)
            rows = None
            if self._sends_embedding:
                rows = torch.zeros(len(words), embedded.shape[1])
                is_word = torch.isin(text, words)
                rows.index_add_(0, torch.searchsorted(words, text[is_word]), embedded[is_word])
            gradient[:] = self._sample_numbers(parts, rows)
        return gradients

    def _sample_numbers(self, parts: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        """Return the numbers that are compared, of the parameters and of the embedding's rows."""
        sampled = torch.cat([part.flatten() for part in parts])[:: self._stride]
        return sampled if rows is None else torch.cat([sampled, rows.flatten()])

    def _differentiate(self, text: Tensor, label: int) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of the parameters but the embedding, and of the embedded words, `position dim`."""
        with torch.enable_grad():
            embedded = self._model.embedding(text[None]).detach().requires_grad_(True)
            loss = self._blocks.loss(self._model(embedded), torch.tensor([label]))
            *gradients, at_words = torch.autograd.grad(loss, [*self._parameters, embedded])
        return gradients, at_words[0]


def _rows(gradients: Tensor, indices: Sequence[int]) -> Tensor:
    """Return rows of gradients, also none."""
    return gradients[torch.tensor(indices, dtype=torch.int64)]
