"""DAGER: exact texts from the gradients of a transformer's first two attention layers (Petrov et al. 2024)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.scene import warn_of_dropout
from adversaries.text.attention_span import Blocks
from adversaries.text.causal_search import CausalSearch
from adversaries.text.whole_search import whole_texts
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Texts
from fedsim.recording.transcript import Transcript

log = logging.getLogger("fedsim." + __name__)
_COMPLETE = 1e-5
"""Share of the gradient that texts may leave over and yet be all there are; rounding leaves about 1e-7."""
_MUCH = 0.1
"""Share of the gradient that is left over from which on texts are missing or wrong, not only moved by training."""


@dataclass(frozen=True, kw_only=True)
class Dager(Attack):
    """Exact texts from one update of a transformer, without optimisation: by the span of its attention's gradients.

    The gradient of a linear layer is a sum of products with its inputs, so the rows of those of the queries, keys and
    values of a block span the words' vectors that go into its attention, as long as there are fewer words than
    dimensions. (1) A word at a place is possible if its vector lies in the span of the first block. (2) What goes into
    the second block depends on the text as a whole, so a text whose vectors all lie in its span is the client's. In a
    decoder that is checked word by word. In an encoder all places depend on all others, so there texts are searched
    for: from starts that the gradients of single words suggest, by changing one word after another.

    All is computed in float64. Which directions count follows from the rounding of the message, see `Span.of`. Only
    words whose row of the embedding moved are tried, in a decoder those near to the first span where none moved. A
    decoder that predicts from its last place needs three blocks, because of two the second one's gradient is of last
    places alone.

    Weights that were returned are read like a gradient. That assumes plain SGD, whose steps all add to the span, and so
    little movement that the words' vectors stay where they were: few steps at a small rate. Otherwise the words of the
    first mini-batch are what is found, or nothing.

    Args:
        tolerances: sines of the largest angle to the span that a vector may have, tried one after the other, until the
            texts explain all of the second block's gradient; otherwise the texts that explain most of it are claimed.
            An encoder's texts count as found below the second of them, or the only one, in the root mean square over
            its words, or if it can be taken out of the message; the texts that come nearest fill up.
                                                                           [Petrov et al.: 1e-5 and 1e-3; FedAvg 5e-3]
        attempts: starts for each text of an encoder, at most.

    References:
        Petrov, Dimitrov, Baader, Müller, Vechev: DAGER, NeurIPS 2024, Algorithms 1 to 4. Differs: queries, keys and
        values are read together, because the queries' gradient at the first place is 0; tolerances are swept; words are
        those whose embedding moved; where more texts pass than the client has, those are claimed that explain most of
        the gradient; an encoder's texts are found from the gradients of words and positions, which are trained here,
        and of texts that are guessed, by a local search, where the paper combines words exhaustively.
    """

    tolerances: tuple[float, ...] = (1e-3, 5e-3, 2e-2, 5e-2)
    attempts: int = 3

    paper: ClassVar[Paper] = Paper(
        title="DAGER: Exact Gradient Inversion for Large Language Models",
        authors="Petrov, Dimitrov, Baader, Müller, Vechev",
        venue="NeurIPS",
        year=2024,
        url="https://arxiv.org/abs/2405.15586",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape"})
    texts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.tolerances or not all(0 < tolerance < 1 for tolerance in self.tolerances):
            raise ConfigError(f"tolerances: expected one or more values between 0 and 1, got {list(self.tolerances)}")
        if self.attempts < 1:
            raise ConfigError(f"attempts: expected at least 1, got {self.attempts}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        update = single_update(transcript, victim)
        if update.num_examples < 1:
            raise AttackError(
                f"round {update.round}, client {victim}: N is {update.num_examples}, so nothing says how many texts to "
                "look for; attack a client that reports its num_examples"
            )
        blocks = Blocks.of(update, knowledge)
        warn_of_dropout(self, blocks.model, knowledge, blocks.where)
        search = self._causal if blocks.model.causal else self._whole
        with torch.no_grad():
            tokens = search(blocks, update.num_examples, progress)
            if not len(tokens):
                raise AttackError(
                    f"{blocks.where}: no text fits the gradients of the second block: its inputs moved too far in "
                    f"local training, compression left too little of them, or not all places have one; {blocks.instead}"
                )
            if len(tokens) < update.num_examples:
                log.warning(
                    "%s on %s: %d texts are found, N is %d; equal texts count once",
                    self.called, blocks.where, len(tokens), update.num_examples,
                )  # fmt: skip
            if not blocks.states.direction("linear.weight").any():
                log.warning("%s on %s: the last layer was not sent; labels are guesses", self.called, blocks.where)
            return Texts(tokens=tokens, labels=blocks.labels(tokens))

    def _causal(self, blocks: Blocks, texts: int, progress: Progress) -> Tensor:
        search, least = CausalSearch(blocks, texts), 1.0
        best = torch.empty((0, blocks.length), dtype=torch.int64)
        steps, total = count(1), len(self.tolerances) * blocks.length + 1

        def tell() -> None:
            progress(next(steps), total, {"objective": least})

        for tolerance in sorted(self.tolerances):
            tokens = _explaining(blocks, search.texts(tolerance, tolerance, tell), texts)
            if len(tokens) and (left := blocks.unexplained(tokens)) < least:
                best, least = tokens, left
            if least < _COMPLETE:
                break
        if len(best) and least > _MUCH:
            log.warning(
                "%s on %s: the texts leave %.0f %% of the second block's gradient over, so some are missing or wrong",
                self.called, blocks.where, 100 * least,
            )  # fmt: skip
        progress(total, total, {"objective": least})
        return best

    def _whole(self, blocks: Blocks, texts: int, progress: Progress) -> Tensor:
        steps, total = count(1), self.attempts * texts + 1
        most = sorted(self.tolerances)[:2][-1]

        def tell(found: int) -> None:
            progress(next(steps), total, {"objective": 1 - found / texts})

        tokens, found = whole_texts(blocks, most, total - 1, tell)
        if unfit := int((~found).sum()):
            log.warning(
                "%s on %s: %d of %d texts do not fit the gradients; they only come nearest",
                self.called, blocks.where, unfit, len(tokens),
            )  # fmt: skip
        progress(total, total, {"objective": blocks.unexplained(tokens)})
        return tokens


def _explaining(blocks: Blocks, tokens: Tensor, most: int) -> Tensor:
    """At most so many of these texts: one after the other the one that leaves the least of the gradient over."""
    if len(tokens) <= most:
        return tokens
    tokens = tokens[blocks.misfits(tokens).argsort()][: 8 * most]
    chosen: list[int] = []
    for _ in range(most):
        rest = [place for place in range(len(tokens)) if place not in chosen]
        chosen.append(min(rest, key=lambda place: blocks.unexplained(tokens[[*chosen, place]])))
    return tokens[chosen]
