"""DAGER: exact texts from a transformer's attention gradients [Petrov2024]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Annotated, ClassVar

import torch
from annotated_types import MinLen
from torch import Tensor

from adversaries.text.attention_blocks import AttentionBlocks, TransformerAttack, check_num_texts
from adversaries.text.decoder_search import DecoderSearch
from adversaries.text.encoder_search import find_encoder_texts
from fedsim.base.constraints import PositiveInt, PositiveShareBelowOne
from fedsim.base.errors import AttackError, format_percent
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper, Progress, Target, warn
from fedsim.interfaces.findings import Texts
from fedsim.inversion.training_mismatch import warn_of_dropout

_COMPLETE_SHARE = 1e-5
"""Texts are complete if they leave a smaller share of the gradient; rounding leaves about 1e-7."""
_INCOMPLETE_SHARE = 0.1
"""Texts that leave a larger share of the gradient are incomplete or wrong; drift leaves less."""


@dataclass(frozen=True, kw_only=True)
class Dager(TransformerAttack):
    """Recover exact texts from one update of a transformer by the spans of its attention gradients.

    The gradient of a linear layer is a sum of outer products with its inputs. So the rows of the
    query, key and value gradients of a block span the inputs of its attention, as long as there are
    fewer words than dimensions.

    1. Compute the spans of the first two blocks' gradients (`AttentionBlocks.from_update`).
    2. A word at a position is a candidate if its embedding lies in the first span.
    3. The inputs of the second block depend on the whole text, so a text whose inputs all lie in
       the second span is the client's. In a decoder this is checked word by word (`DecoderSearch`).
       In an encoder all positions depend on each other, so texts are searched for from starts that
       the gradients of single words suggest, by changing one word at a time (`find_encoder_texts`).
    4. Read the labels from the last layer's gradient (`AttentionBlocks.recover_labels`).

    All is computed in float64. The rounding of the message decides which directions count, see
    `AttentionSpan.from_message`. Only words with a gradient in the embedding are tried; in a
    decoder whose embedding has none, those close to the first span. A decoder that predicts from
    its last position needs three blocks, because with two the second one has a gradient only at
    last positions.

    Of adapters (LoRA) the gradient of A spans the inputs, once B is not 0; that of the value's B spans
    A times the inputs from the first round on (`find_span_weights`).

    Returned weights are read like a gradient. That assumes plain SGD, whose steps all add to the
    span, and little drift of the inputs: few steps with a small learning rate. Otherwise only the
    words of the first mini-batch are found, or nothing.

    Args:
        tolerances: sines of the largest angle between input and span, tried one after the other,
            until the texts explain all of the second block's gradient; otherwise the texts that
            explain most of it are claimed. An encoder's text counts as found below the second of
            them, or the only one, in the root mean square over its words, or if it can be
            subtracted from the message; the nearest other texts fill the claim. [Petrov et al.:
            1e-5 and 1e-3; FedAvg 5e-3]
        attempts: most starts for each text of an encoder.

    References:
        [Petrov2024], Algorithms 1 to 4. Differs: queries, keys and values are read jointly, because
        the queries' gradient at the first position is 0; tolerances are swept; candidate words are
        those with a gradient in the embedding; if more texts pass than the client has, those are
        claimed that explain most of the gradient; an encoder's texts are found by a local search
        from the gradients of words and positions, which are trained here, and of guessed texts,
        where the paper combines words exhaustively, or without these from likely pairs of word and
        position; of adapters the gradient of B is read where that of A is 0 or the words are few.
    """

    tolerances: Annotated[tuple[PositiveShareBelowOne, ...], MinLen(1)] = (1e-3, 5e-3, 2e-2, 5e-2)
    attempts: PositiveInt = 3

    paper: ClassVar[Paper] = cite("Petrov2024")

    def _run(self, target: Target, progress: Progress) -> Texts:
        update, knowledge = target.read_update(), target.knowledge
        check_num_texts(update)
        blocks = AttentionBlocks.from_update(update, knowledge)
        warn_of_dropout(self, blocks.model, knowledge, blocks.where)
        search = self._search_decoder if blocks.model.causal else self._search_encoder
        with torch.no_grad():
            tokens = search(blocks, update.num_examples, progress)
            if not len(tokens):
                raise AttackError(
                    f"{blocks.where}: no text fits the gradients of the second block: its inputs moved too far in "
                    f"local training, compression left too little of them, or not all places have one; {blocks.remedy}"
                )
            self._warn_of_gaps(blocks, len(tokens))
            return Texts(tokens=tokens, labels=blocks.recover_labels(tokens))

    def _search_decoder(self, blocks: AttentionBlocks, num_texts: int, progress: Progress) -> Tensor:
        """Return the texts that explain most of the second block's gradient."""
        search = DecoderSearch(blocks, num_texts)
        best, smallest_share = torch.empty((0, blocks.length), dtype=torch.int64), 1.0
        steps, total = count(1), len(self.tolerances) * blocks.length + 1

        def report() -> None:
            progress(next(steps), total, {"objective": smallest_share})

        for tolerance in sorted(self.tolerances):
            tokens = _select_texts(blocks, search.find_texts(tolerance, tolerance, report), num_texts)
            if len(tokens) and (share := blocks.unexplained_share(tokens)) < smallest_share:
                best, smallest_share = tokens, share
            if smallest_share < _COMPLETE_SHARE:
                break
        if len(best) and smallest_share > _INCOMPLETE_SHARE:
            warn(
                f"{self.title} on {blocks.where}: the texts leave {format_percent(smallest_share, '.0f')} of "
                "the second block's gradient over, so some are missing or wrong"
            )
        progress(total, total, {"objective": smallest_share})
        return best

    def _search_encoder(self, blocks: AttentionBlocks, num_texts: int, progress: Progress) -> Tensor:
        """Return the texts that fit the second block, then those that come nearest."""
        steps, total = count(1), self.attempts * num_texts + 1
        max_misfit = sorted(self.tolerances)[:2][-1]

        def report(num_found: int) -> None:
            progress(next(steps), total, {"objective": 1 - num_found / num_texts})

        tokens, fits = find_encoder_texts(blocks, max_misfit, total - 1, report)
        if num_unfit := int((~fits).sum()):
            warn(
                f"{self.title} on {blocks.where}: {num_unfit} of {len(tokens)} texts do not fit "
                "the gradients; they only come nearest"
            )
        progress(total, total, {"objective": blocks.unexplained_share(tokens)})
        return tokens


def _select_texts(blocks: AttentionBlocks, tokens: Tensor, max_texts: int) -> Tensor:
    """Select texts greedily so that they explain most of the second block's gradient."""
    if len(tokens) <= max_texts:
        return tokens
    tokens = tokens[blocks.misfits(tokens).argsort()][: 8 * max_texts]
    selected: list[int] = []
    for _ in range(max_texts):
        remaining = [index for index in range(len(tokens)) if index not in selected]
        selected.append(min(remaining, key=lambda index: blocks.unexplained_share(tokens[[*selected, index]])))
    return tokens[selected]
