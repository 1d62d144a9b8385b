"""Whole texts, where each place of a transformer sees all others: from a good start, by a beam of single changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adversaries.text.attention_span import Blocks
from adversaries.text.slopes import Guess, Slopes

_BEAM, _CHOICES = 4, 8
"""Texts that are gone on with at once, and words that are tried at each place of each; more after each failure."""
_TURNS, _PATIENCE, _BROADEST = 40, 2, 3
_AGAIN = 2
"""How often what a search ends with is set right and searched from again."""
_STARTS = 6
"""Of which one leads to guesses that there were not before, or the last one is taken."""
_USED, _UNLIKELY, _UNLIKE = 0.2, 0.02, 0.05


def whole_texts(blocks: Blocks, most: float, attempts: int, tell: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """`text place`, as many texts as the client has or fewer; and `text`, which are found: these come first.

    A text is found that can be taken out of the message, or whose words all fit the second block. What is taken out
    makes the next one easier to find.

    Args:
        blocks: of an encoder.
        most: misfit below which a text is taken for found.
        attempts: starts at most.
        tell: is told after each start how many texts are found.
    """
    found: dict[tuple[int, ...], tuple[bool, float]] = {}
    search, right, failures = WholeSearch(blocks), 0, 0
    for _ in range(attempts):
        text, misfit, rest = search.next(most, min(1 + failures, _BROADEST))
        name = tuple(text.tolist())
        sure = name not in found and (rest is not None or misfit < most)
        found.setdefault(name, (not sure, misfit))
        right += sure
        failures = 0 if sure else failures + 1
        tell(right)
        if right >= blocks.texts:
            break
        if sure:
            if rest is not None and not len(rest.words):
                break
            search = search.gone_on(text) if rest is None else WholeSearch(rest)
        if search.exhausted:
            break
    chosen = sorted(found, key=found.__getitem__)[: blocks.texts]
    return torch.tensor(chosen), torch.tensor([not found[name][0] for name in chosen])


class WholeSearch:
    """Searches for a text whose words all fit the second block.

    One wrong word moves what the second block sees at all places of a text, so a text can only be judged as a whole. A
    start comes from what the messages say of single words, see `_traces`, the clearest first, and is set right by what
    the text's own gradient asks for, see `Slopes`. What is still wrong is searched for by a beam of single changes.

    Attributes:
        blocks: what the message says.
        places: `word place`, how likely a text that is not found yet has the word there.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self._coarse = blocks, blocks.coarse()
        of_words, of_places, values = _traces(blocks)
        self.places = _places(of_words, of_places)
        self._slopes = Slopes(blocks, self.places)
        self._starts = self.places * of_words.norm(dim=1, keepdim=True)
        self._alike = values @ values.T
        self._guessed: set[tuple[int, ...]] = set()

    @property
    def exhausted(self) -> bool:
        """Whether all starts were tried."""
        return not bool(self._starts.any())

    def gone_on(self, text: Tensor) -> WholeSearch:
        """The same, to which the words of a text that is found are less likely where they stand."""
        at = torch.searchsorted(self.blocks.words, text[text != self.blocks.padding])
        for likely in (self.places, self._starts):
            likely[at, torch.arange(len(at))] *= _USED
        return self

    def next(self, most: float, breadth: int) -> tuple[Tensor, float, Blocks | None]:
        """The text that the clearest word at a place leads to, its misfit, and the message without it, if that is told.

        Args:
            most: misfit at which it stops.
            breadth: by how much more is tried than at first.
        """
        guesses = self._guesses()
        for _ in range(_AGAIN):
            text = guesses[0].text
            misfit, rest = float(self.blocks.misfits(text[None])), self.blocks.without(text)
            if rest is not None or misfit < most:
                break
            text, misfit = self._descended(guesses, most, breadth)
            rest = self.blocks.without(text)
            if rest is not None or misfit < most:
                break
            guesses = self._slopes.guesses(*self._read(text))
        return text, misfit, rest

    def _read(self, text: Tensor) -> tuple[Tensor, int]:
        """`place`, numbers of its words, or where there is none of one that is likely; and how many words it has."""
        held = torch.isin(text, self.blocks.words)
        at = torch.searchsorted(self.blocks.words, text).clamp(max=len(self.blocks.words) - 1)
        return torch.where(held, at, self.places.argmax(0)), int(held.sum())

    def _guesses(self) -> list[Guess]:
        """Those of the clearest start that leads to others than before, or of the last one that is tried."""
        for _ in range(_STARTS):
            word, place = divmod(int(self._starts.argmax()), self.blocks.length)
            self._starts[word, place] = 0
            likely = (self._alike[word][:, None].clamp_min(0) + _UNLIKE) * (self.places + _UNLIKELY)
            likely[:, place], likely[word, place] = 0, likely.max() + 1
            guesses = self._slopes.guesses(likely.argmax(0), place + 1)
            name = tuple(guesses[0].text.tolist())
            if name not in self._guessed or self.exhausted:
                break
        self._guessed.add(name)
        return guesses

    def _descended(self, guesses: Sequence[Guess], most: float, breadth: int) -> tuple[Tensor, float]:
        words = self.blocks.words
        likely = torch.stack([guess.likely for guess in guesses]).sum(0)
        choices = words[likely.topk(min(_CHOICES * breadth, len(words)), dim=0).indices]
        beam = torch.stack([guess.text for guess in guesses])
        beam = beam[self._coarse.misfits(beam).argsort()]
        best, stuck, all_words = math.inf, 0, True
        seen: set[tuple[int, ...]] = set()
        for _ in range(_TURNS):
            new = [text for text in beam if tuple(text.tolist()) not in seen]
            seen |= {tuple(text.tolist()) for text in new}
            tried, allowed = (beam[:1], words[:, None].expand(-1, self.blocks.length)) if all_words else (new, choices)
            pool = torch.unique(torch.cat([beam, *(self._changed(text, allowed) for text in tried)]), dim=0)
            misfits = self._coarse.misfits(pool)
            order = misfits.argsort()[: _BEAM * breadth]
            beam, now = pool[order], float(misfits[order[0]])
            better, best = now < best, min(now, best)
            if best < most or (stuck == _PATIENCE and not better):
                break
            stuck = 0 if better else stuck + 1
            all_words = stuck == _PATIENCE
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
