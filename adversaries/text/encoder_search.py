"""Search for an encoder's texts by a beam of single-word changes from good starts (DAGER)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adversaries.text.attention_blocks import AttentionBlocks
from adversaries.text.pair_search import find_paired_texts
from adversaries.text.token_gradients import Guess, TokenGradients
from adversaries.text.word_exchange import change_one_word

_BEAM_WIDTH, _WORDS_PER_POSITION = 4, 8
"""Texts in the beam, and words tried at each position of each; both grow after each failure."""
_MAX_BEAM_STEPS, _PATIENCE, _MAX_BREADTH = 40, 2, 3
_MAX_RESTARTS = 2
"""How often the result of a beam search is refined by its gradient and searched from again."""
_MAX_STARTS = 6
"""Starts that are tried until one leads to a new guess; otherwise the last one is used."""
_FOUND_FACTOR = 0.2
"""Factor of the scores of words at positions that a found text explains."""
_POSITION_FLOOR, _SIMILARITY_FLOOR = 0.02, 0.05
"""Added to position scores and similarities, so that neither excludes a word."""


def find_encoder_texts(
    blocks: AttentionBlocks, max_misfit: float, attempts: int, report: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Search for the client's texts one after the other.

    A text is found if it can be subtracted from the message, or if all its words fit the second
    span. The subtraction makes the next text easier to find. Where the embedding has no gradient,
    texts are searched for from pairs of word and position (`find_paired_texts`).

    Args:
        max_misfit: misfit below which a text is found.
        attempts: most starts.
        report: called after each start with the number of texts found.

    Returns:
        At most N texts, `text position`, and which of them are found, `text`; these come first.
    """
    if not blocks.has_embedding_gradient:
        texts, fits = find_paired_texts(blocks, max_misfit, attempts, report)
        return texts[: blocks.num_texts], fits[: blocks.num_texts]
    results: dict[tuple[int, ...], tuple[bool, float]] = {}  # text: (not found, misfit)
    search, num_found, failures = EncoderSearch(blocks), 0, 0
    for _ in range(attempts):
        text, misfit, remainder = search.find_next(max_misfit, min(1 + failures, _MAX_BREADTH))
        key = tuple(text.tolist())
        is_found = key not in results and (remainder is not None or misfit < max_misfit)
        results.setdefault(key, (not is_found, misfit))
        num_found += is_found
        failures = 0 if is_found else failures + 1
        report(num_found)
        if num_found >= blocks.num_texts:
            break
        if is_found:
            if remainder is not None and not len(remainder.words):
                break
            search = search.mark_found(text) if remainder is None else EncoderSearch(remainder)
        if search.is_exhausted:
            break
    best = sorted(results, key=results.__getitem__)[: blocks.num_texts]
    return torch.tensor(best), torch.tensor([not results[key][0] for key in best])


class EncoderSearch:
    """Searches for a text whose words all fit the second span.

    One wrong word changes the inputs of the second block at all positions, so only a whole text can
    be checked. A start is a likely word at a position (`_split_gradients`), the likeliest first. It
    is corrected by the text's own gradient (`TokenGradients`), and then by a beam search over
    changes of single words.

    Attributes:
        blocks: the blocks and spans of the message.
        position_scores: `word position`, in [0, 1], how likely a remaining text has the word at the
            position.
    """

    def __init__(self, blocks: AttentionBlocks) -> None:
        self.blocks, self._float32_blocks = blocks, blocks.to_float32()
        word_gradients, position_gradients, value_gradients = _split_gradients(blocks)
        self.position_scores = _score_positions(word_gradients, position_gradients)
        self._token_gradients = TokenGradients(blocks, self.position_scores)
        self._start_scores = self.position_scores * word_gradients.norm(dim=1, keepdim=True)
        self._word_similarities = value_gradients @ value_gradients.T
        self._earlier_guesses: set[tuple[int, ...]] = set()

    @property
    def is_exhausted(self) -> bool:
        """Return whether all starts were tried."""
        return not bool(self._start_scores.any())

    def mark_found(self, text: Tensor) -> EncoderSearch:
        """Lower the scores of the words of a found text at their positions; return the search."""
        word_indices = torch.searchsorted(self.blocks.words, text[text != self.blocks.padding])
        for scores in (self.position_scores, self._start_scores):
            scores[word_indices, torch.arange(len(word_indices))] *= _FOUND_FACTOR
        return self

    def find_next(self, max_misfit: float, breadth: int) -> tuple[Tensor, float, AttentionBlocks | None]:
        """Search from the likeliest start.

        Args:
            max_misfit: misfit below which the search stops.
            breadth: factor of the beam's width and of the words tried.

        Returns:
            The text, its misfit, and the message without it, None if it cannot be subtracted.
        """
        guesses = self._guess_texts()
        for _ in range(_MAX_RESTARTS):
            text = guesses[0].text
            misfit, remainder = float(self.blocks.misfits(text[None])), self.blocks.subtract_text(text)
            if remainder is not None or misfit < max_misfit:
                break
            text, misfit = self._search_beam(guesses, max_misfit, breadth)
            remainder = self.blocks.subtract_text(text)
            if remainder is not None or misfit < max_misfit:
                break
            guesses = self._token_gradients.refine_guess(*self._find_word_indices(text))
        return text, misfit, remainder

    def _find_word_indices(self, text: Tensor) -> tuple[Tensor, int]:
        """Return the indices of the text's words (likely ones for padding) and their number."""
        words = self.blocks.words
        is_word = torch.isin(text, words)
        word_indices = torch.searchsorted(words, text).clamp(max=len(words) - 1)
        return torch.where(is_word, word_indices, self.position_scores.argmax(0)), int(is_word.sum())

    def _guess_texts(self) -> list[Guess]:
        """Return the guesses of the likeliest start that leads to a new text."""
        for _ in range(_MAX_STARTS):
            word, position = divmod(int(self._start_scores.argmax()), self.blocks.length)
            self._start_scores[word, position] = 0

            # Prefer words that are similar to the start's and likely at their position.
            similarities = self._word_similarities[word][:, None].clamp_min(0) + _SIMILARITY_FLOOR
            scores = similarities * (self.position_scores + _POSITION_FLOOR)
            scores[:, position], scores[word, position] = 0, scores.max() + 1
            guesses = self._token_gradients.refine_guess(scores.argmax(0), position + 1)
            best_text = tuple(guesses[0].text.tolist())
            if best_text not in self._earlier_guesses or self.is_exhausted:
                break
        self._earlier_guesses.add(best_text)
        return guesses

    def _search_beam(self, guesses: Sequence[Guess], max_misfit: float, breadth: int) -> tuple[Tensor, float]:
        """Change one word at a time; return the best text and its misfit, in float32."""
        words = self.blocks.words
        all_words = words[:, None].expand(-1, self.blocks.length)
        scores = torch.stack([guess.word_scores for guess in guesses]).sum(0)
        likely_words = words[scores.topk(min(_WORDS_PER_POSITION * breadth, len(words)), dim=0).indices]
        beam = torch.stack([guess.text for guess in guesses])
        beam = beam[self._float32_blocks.misfits(beam).argsort()]

        lowest, steps_without_progress, try_all_words = math.inf, 0, True
        expanded: set[tuple[int, ...]] = set()
        for _ in range(_MAX_BEAM_STEPS):
            # Change the best text by any word, or all new texts by likely words.
            new_texts = [text for text in beam if tuple(text.tolist()) not in expanded]
            expanded |= {tuple(text.tolist()) for text in new_texts}
            texts, choices = (beam[:1], all_words) if try_all_words else (new_texts, likely_words)
            changes = [change_one_word(text, choices, self.blocks.padding) for text in texts]
            pool = torch.unique(torch.cat([beam, *changes]), dim=0)

            # Keep the best texts.
            misfits = self._float32_blocks.misfits(pool)
            order = misfits.argsort()[: _BEAM_WIDTH * breadth]
            beam, misfit = pool[order], float(misfits[order[0]])

            improved, lowest = misfit < lowest, min(misfit, lowest)
            if lowest < max_misfit or (steps_without_progress == _PATIENCE and not improved):
                break
            steps_without_progress = 0 if improved else steps_without_progress + 1
            try_all_words = steps_without_progress == _PATIENCE
        return beam[0], lowest


def _split_gradients(blocks: AttentionBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """Split the message into gradients of single words and of single positions.

    The input of the first block is a word's vector plus a position's, normalised. So the gradients
    of queries, keys and values are sums of outer products with these, and least squares yields one
    gradient for each word and each position. A word's is the sum over its positions, a position's
    the sum over the words there. The same holds for the gradients of the embedding and of the
    positions themselves. Where attention is nearly uniform, as in networks that are little trained,
    the value gradients of all words of a text are nearly the same.

    Returns:
        `word number` and `position number`, gradients of the queries, the values and the embedding;
        and `word dim`, the normalised value gradients.
    """
    model, first = blocks.model, blocks.block(0)
    vectors = torch.cat([model.embedding.weight[blocks.words], model.positions[: blocks.length]])
    inputs = (vectors - vectors.mean(1, keepdim=True)) * first.norm1.weight
    gradient = blocks.spans[0].gradient
    solution = torch.linalg.lstsq(inputs.T, gradient.T, driver="gelsd").solution
    embedding_gradient = blocks.states.direction("embedding.weight", torch.float64)[blocks.words]
    position_gradient = blocks.states.direction("positions", torch.float64)[: blocks.length]

    num_words, (queries, _, values) = len(blocks.words), solution.chunk(3, 1)
    columns = [part / part[:num_words].norm() for part in (queries, values)]
    columns.append(torch.cat([embedding_gradient, position_gradient]) / embedding_gradient.norm())
    gradients = torch.cat(columns, 1)
    return gradients[:num_words], gradients[num_words:], normalize(values[:num_words], dim=1)


def _score_positions(word_gradients: Tensor, position_gradients: Tensor) -> Tensor:
    """Return the share of each word's gradient at each position, `word position` in [0, 1]."""
    from scipy.optimize import nnls

    shares = []
    for gradient in position_gradients:
        solution, _ = nnls(word_gradients.T.numpy(), gradient.numpy(), maxiter=100 * len(word_gradients))
        shares.append(torch.from_numpy(solution))
    return torch.stack(shares, 1).clamp(max=1)
