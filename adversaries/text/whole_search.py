"""Whole texts, where each place of a transformer sees all others: from a good start, by a beam of single changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adversaries.text.attention_span import Blocks

_BEAM, _CHOICES = 4, 8
"""Texts that are gone on with at once, and words that are tried at each place of each; more after each failure."""
_TURNS, _PATIENCE, _BROADEST = 40, 2, 3
_USED, _UNLIKELY = 0.2, 0.02


def whole_texts(blocks: Blocks, most: float, attempts: int, tell: Callable[[int], None]) -> Tensor:
    """`text place`, as many texts as the client has or fewer, those that fit best first.

    A text that is found is taken out of the message where that is possible, so that the next one is easier to find.

    Args:
        blocks: of an encoder.
        most: misfit below which a text is taken for found.
        attempts: starts at most.
        tell: is told after each start how many texts are found.
    """
    found: dict[tuple[int, ...], float] = {}
    search, right, failures = WholeSearch(blocks), 0, 0
    for _ in range(attempts):
        text, misfit = search.next(most, min(1 + failures, _BROADEST))
        fresh = tuple(text.tolist()) not in found
        found[tuple(text.tolist())] = misfit
        right += fresh and misfit < most
        failures = 0 if fresh and misfit < most else failures + 1
        tell(right)
        if right >= blocks.texts:
            break
        if fresh and misfit < most:
            rest = search.blocks.without(text)
            if rest is not None and not len(rest.words):
                break
            search = search.gone_on(text) if rest is None else WholeSearch(rest)
        if not search.places.any():
            break
    return torch.tensor(sorted(found, key=found.__getitem__)[: blocks.texts])


class WholeSearch:
    """Searches for a text whose words all fit the second block.

    One wrong word moves what the second block sees at all places of a text, so a text can only be judged as a whole. A
    start comes from two things that the messages say of single words, see `_traces`.

    Attributes:
        blocks: what the message says.
        places: `word place`, how likely a text that is not found yet has the word there.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self._coarse = blocks, blocks.coarse()
        of_words, of_places, values = _traces(blocks)
        self.places = _places(of_words, of_places)
        self._alike = values @ values.T

    def gone_on(self, text: Tensor) -> WholeSearch:
        """The same, to which the words of a text that is found are less likely where they stand."""
        at = torch.searchsorted(self.blocks.words, text[text != self.blocks.padding])
        self.places[at, torch.arange(len(at))] *= _USED
        return self

    def next(self, most: float, breadth: int) -> tuple[Tensor, float]:
        """The text that the likeliest word at a place leads to, and its misfit.

        Args:
            most: misfit at which it stops.
            breadth: by how much more is tried than at first.
        """
        word, place = divmod(int(self.places.argmax()), self.blocks.length)
        text, misfit = self._descended(word, place, most, breadth)
        self.places[word, place] = 0
        return text, misfit

    def _descended(self, word: int, place: int, most: float, breadth: int) -> tuple[Tensor, float]:
        words = self.blocks.words
        likely = (self._alike[word][:, None].clamp_min(0) + 0.05) * (self.places + _UNLIKELY)
        likely[:, place], likely[word, place] = 0, likely.max() + 1
        choices = words[likely.topk(min(_CHOICES * breadth, len(likely)), dim=0).indices]
        beam, best, stuck = choices[:1], float("inf"), 0
        seen: set[tuple[int, ...]] = set()
        for _ in range(_TURNS):
            new = [text for text in beam if tuple(text.tolist()) not in seen]
            seen |= {tuple(text.tolist()) for text in new}
            all_words = stuck == _PATIENCE
            tried, allowed = (beam[:1], words[:, None].expand(-1, self.blocks.length)) if all_words else (new, choices)
            pool = torch.unique(torch.cat([beam, *(self._changed(text, allowed) for text in tried)]), dim=0)
            misfits = self._coarse.misfits(pool)
            order = misfits.argsort()[: _BEAM * breadth]
            beam, now = pool[order], float(misfits[order[0]])
            better, best = now < best, min(now, best)
            if best < most or (all_words and not better):
                break
            stuck = 0 if better else stuck + 1
        return beam[0], best

    def _changed(self, text: Tensor, words: Tensor) -> Tensor:
        """`text place`: it with one of `choice place` words at one place, or shorter or longer by one word."""
        length, padding = len(text), self.blocks.padding
        held = length if padding is None else int((text != padding).sum())
        changed = text.expand(held, len(words), length).clone()
        for place in range(held):
            changed[place, :, place] = words[:, place]
        others = [changed.flatten(0, 1)]
        if padding is not None and held > 1:
            others.append(torch.where(torch.arange(length) < held - 1, text, padding)[None])
        if padding is not None and held < length:
            longer = text.expand(len(words), length).clone()
            longer[:, held] = words[:, held]
            others.append(longer)
        return torch.cat(others)


def _traces(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """`word trace` and `place trace`, gradients that belong to each; and `word dim`, normalised, those of the values.

    What goes into the first block is a word's vector plus a place's, normalised. So the gradients of queries, keys and
    values are sums of one vector a word and one a place, times these. Those, found by least squares, are sums over the
    places of a word, and over the words of a place: a place's is the sum of those of the words that stand there. So are
    the gradients of the embedding and of the positions themselves. And where attention is spread out, as in networks
    that are little trained, the gradients of the values of all words of a text are nearly the same.
    """
    model, first = blocks.model, blocks.block(0)
    vectors = torch.cat([model.embedding.weight[blocks.words], model.positions[: blocks.length]])
    inputs = (vectors - vectors.mean(1, keepdim=True)) * first.norm1.weight
    gradient = blocks.spans[0].gradient
    slopes = torch.linalg.lstsq(inputs.T, gradient.T, driver="gelsd").solution
    own = blocks.states.direction("embedding.weight", torch.float64)[blocks.words]
    placed = blocks.states.direction("positions", torch.float64)[: blocks.length]
    count, (queries, _, values) = len(blocks.words), slopes.chunk(3, 1)
    traces = [torch.cat([part[:count], part[count:]]) / part[:count].norm() for part in (queries, values)]
    traces.append(torch.cat([own, placed]) / own.norm())
    whole = torch.cat(traces, 1)
    return whole[:count], whole[count:], normalize(values[:count], dim=1)


def _places(of_words: Tensor, of_places: Tensor) -> Tensor:
    """`word place` in [0, 1]: how much of a word's trace seems to be at each place."""
    from scipy.optimize import nnls

    shares = [nnls(of_words.T.numpy(), place.numpy(), maxiter=100 * len(of_words))[0] for place in of_places]
    return torch.stack([torch.from_numpy(share) for share in shares], 1).clamp(max=1)
