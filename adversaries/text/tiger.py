"""Texts from noised attention gradients, by distance to their span (idea of TIGER) [Kalikman2026]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.text.attention_blocks import AttentionBlocks, TransformerAttack, check_num_texts, read_transformer
from adversaries.text.attention_span import AttentionSpan, find_span_weights
from adversaries.text.decoder_search import DecoderSearch
from adversaries.text.encoder_search import find_encoder_texts
from adversaries.text.message_fit import MessageFit
from adversaries.text.pair_search import find_paired_texts
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError, format_percent
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper, Progress, Target, warn
from fedsim.interfaces.findings import Texts
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.message_noise import TrainingFacts, combine_noise
from fedsim.inversion.named_states import NamedStates
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS
from fedsim.inversion.training_mismatch import warn_of_dropout
from fedsim.recording.wire_format import Update
from fedsim.training.settings import known_steps

_EDGE_MARGIN = 1.02
"""The largest singular value of noise fluctuates by about 1 % around its expectation."""
_MIN_COMPLEMENT = 8
"""Least dimension of the complement; with fewer, all words are near the span."""
_KEPT_PER_TEXT = 4
"""Texts of each length of a decoder that are compared with the message, as a multiple of N."""
_NOISE_MARGIN = 1.5
"""Factor by which what is left may exceed the estimated noise; the estimate is wrong by up to a third."""
_EXPLAINED_SHARE = 1e-3
"""Share of the message that may be left beyond noise, by rounding."""


@dataclass(frozen=True, kw_only=True)
class Tiger(TransformerAttack):
    """Find texts by the distance of their words from the spans of noised gradients, then by the whole message.

    `dager` asks whether an input lies in the span of a block's gradients. Under noise none does, and
    it refuses. The distance itself remains informative, and here it ranks texts.

    1. Find the standard deviation of the noise (`_find_deviation`): that of the known defenses, or
       else the one at which a random matrix has the median singular value of the gradient, or a
       smaller one where texts may span more than a third of the dimensions. The latter is too large
       where texts span nearly all of them.
    2. Keep the directions of each gradient above the largest singular value of noise alone,
       sigma (sqrt(rows) + sqrt(columns)) (`_cut_span`).
    3. Try the words with the largest rows in the embedding's gradient; where it has none, those
       nearest to the first span (`_find_words`).
    4. Collect texts (`_find_texts`). In a decoder, build them word by word in a beam search. The
       score of a text is the sum over its words of the squared distances from both spans
       (`DecoderSearch.rank_texts`). In an encoder, or where texts of full length leave more of the
       message than noise would, search for whole texts by their distance from the second span, as
       `dager` does in an encoder (`find_encoder_texts`); of a decoder only if the embedding has a gradient.
    5. Choose the N of these texts whose gradients fit the message best, and change single words,
       ends and classes as long as that improves the fit (`MessageFit`).

    A text that is claimed is the best guess. Warnings say where the texts leave more of the message
    than noise would, or the noise is so large that this cannot be told; and how many texts explain
    no more of the message than one of all texts would of noise. Returned weights are read like a
    gradient, which assumes plain SGD.

    Args:
        words: most words that are tried.
        beam: texts of a decoder that are kept at each position, as a multiple of N.
        attempts: most starts for each text that is searched for as a whole.

    References:
        [Kalikman2026]. Only its abstract and the beginning of its introduction could be had, so all
        steps are guessed but the idea of a continuous distance from the span. Differs: the paper
        optimises embeddings of words by the gradient of that distance, where texts are searched for
        word by word here; step 5, which compares whole gradients, is an addition, which the paper
        does not have as far as it could be read.
    """

    words: PositiveInt = 100
    beam: PositiveInt = 16
    attempts: PositiveInt = 2

    paper: ClassVar[Paper] = cite("Kalikman2026")
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | {"defenses"}

    def _run(self, target: Target, progress: Progress) -> Texts:
        update, knowledge = target.read_update(), target.knowledge
        check_num_texts(update)
        blocks, deviation = self._read_blocks(update, knowledge, target.rng)
        warn_of_dropout(self, blocks.model, knowledge, blocks.where)
        with torch.no_grad():
            fit = MessageFit(blocks)
            enough = _NOISE_MARGIN * fit.noise_share(deviation) + _EXPLAINED_SHARE
            tokens, labels, share = self._find_texts(blocks, fit, enough, progress)
            self._warn_of_gaps(blocks, len(tokens))
            # Say what noise leaves open.
            where = f"{self.title} on {blocks.where}"
            least = _NOISE_MARGIN * fit.share_by_chance(deviation) + _EXPLAINED_SHARE
            if num_guesses := int((fit.explained_shares(tokens, labels) < least).sum()):
                warn(
                    f"{where}: {num_guesses} of {len(tokens)} texts explain no more of the message than some text does "
                    "of noise, so they are guesses"
                )
            noise = format_percent(fit.noise_share(deviation), ".0f")
            if enough >= 1:
                warn(
                    f"{where}: noise is about {noise} of the message, so the residual does not show whether all words "
                    "of the texts are right"
                )
            elif share > enough:
                warn(
                    f"{where}: the texts leave {format_percent(share, '.0f')} of the message over, where noise would "
                    f"leave about {noise}, so some are missing or wrong"
                )
            return Texts(tokens=tokens, labels=labels)

    def _find_texts(
        self, blocks: AttentionBlocks, fit: MessageFit, enough: float, progress: Progress
    ) -> tuple[Tensor, Tensor, float]:
        """Return texts, their classes, and the share of the message that they leave."""
        num_texts, steps = blocks.num_texts, count(1)
        is_searched = blocks.has_embedding_gradient or not blocks.model.causal
        num_starts = self.attempts * num_texts if is_searched else 0
        total = num_starts + blocks.length * blocks.model.causal + 1

        def report(objective: float) -> None:
            progress(next(steps), total, {"objective": objective})

        pools, share = list[Tensor](), math.inf
        if blocks.model.causal:
            kept = _KEPT_PER_TEXT * num_texts
            pools = DecoderSearch(blocks, num_texts).rank_texts(self.beam * num_texts, kept, report)
            tokens, labels = fit.select_texts(pools[-1])
            share = fit.unexplained_share(tokens, labels)
        if share > enough:
            if num_starts:
                # No misfit is small enough under noise: a text is found only if it can be subtracted.
                search = find_encoder_texts if blocks.has_embedding_gradient else find_paired_texts
                texts, _ = search(blocks, 0.0, num_starts, lambda found: report(1 - found / num_texts))
                pools.append(texts)
            tokens, labels = fit.select_texts(torch.cat(pools))
        tokens, labels = fit.refine_texts(tokens, labels)
        share = fit.unexplained_share(tokens, labels)
        progress(total, total, {"objective": share})
        return tokens, labels, share

    def _read_blocks(self, update: Update, knowledge: Knowledge, rng: torch.Generator) -> tuple[AttentionBlocks, float]:
        """Return the blocks with spans above the noise and the words to try, and the noise's deviation."""
        model, states, where = read_transformer(update, knowledge)
        assert knowledge.input_shape is not None
        assert knowledge.loss is not None
        length = knowledge.input_shape[0]

        spans, deviations, max_rank = [], [], update.num_examples * length
        for block in (0, 1):
            names, projection = find_span_weights(model, block, states, max_rank)
            deviation = _find_deviation(names, states, update, knowledge, max_rank, rng)
            spans.append(replace(_cut_span(names, states, max_rank, deviation), projection=projection))
            deviations.append(deviation)
        if not min(span.rank for span in spans):
            raise AttackError(
                f"{where}: no direction of the attention's gradients is above the noise in both of the first two "
                f"blocks, so nothing ranks texts, or {update.num_examples} texts of {length} words span too many "
                "dimensions for noise to be estimated; choose 'embedding-rows' for the words alone"
            )
        blocks = AttentionBlocks(
            model=model,
            states=states,
            words=torch.arange(model.embedding.num_embeddings),
            spans=(spans[0], spans[1]),
            length=length,
            padding=model.embedding.padding_idx,
            loss=knowledge.loss,
            num_texts=update.num_examples,
            where=where,
        )
        return blocks.with_words(self._find_words(blocks)), sum(deviations) / len(deviations)

    def _find_words(self, blocks: AttentionBlocks) -> Tensor:
        """Return the words to try, ascending."""
        if blocks.has_embedding_gradient:
            closeness = blocks.states.direction("embedding.weight", torch.float64).norm(dim=1)
        else:
            closeness = -blocks.first_span_distances().amin(1)
        if blocks.padding is not None:
            closeness[blocks.padding] = -math.inf
        most = min(self.words, int(closeness.isfinite().sum()))
        words: Tensor = closeness.topk(most).indices.sort().values
        return words


def _find_deviation(
    names: Sequence[str],
    states: NamedStates,
    update: Update,
    knowledge: Knowledge,
    max_rank: int,
    rng: torch.Generator,
) -> float:
    """Return the standard deviation of the noise of these weights, from known defenses or the message."""
    sent = {name: states.direction(name) for name in states.shapes if name in names}
    is_gradient = states.gradient is not None
    facts = TrainingFacts(
        num_examples=update.num_examples,
        learning_rate=1.0 if is_gradient else knowledge.learning_rate,
        steps=1 if is_gradient else known_steps(knowledge, update.num_examples),
        batch_size=knowledge.batch_size,
    )
    parts = [defense.message_noise(sent, facts) for defense in knowledge.defenses_in(update.round)]
    known = [part for part in parts if part is not None and not part.reads_message]
    if len(known) == len(parts) and len(update.members) <= 1:  # in a sum, noise is that of all members
        deviations = combine_noise(known, sent).deviations
        deviation = float(torch.cat([deviations[name].flatten() for name in names]).double().square().mean().sqrt())
        if 0 < deviation < math.inf:
            return deviation

    # Compare the median singular value with that of noise of deviation 1, as Gavish and Donoho (2014) do. Where texts
    # may span so many dimensions that the median can be theirs, a smaller value counts.
    gradient = torch.cat([states.direction(name, torch.float64) for name in names])
    noise = torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
    dim = gradient.shape[1]
    position = max(dim // 2, min(max_rank + (dim - max_rank) // 4, dim - 1))
    return float(torch.linalg.svdvals(gradient)[position] / torch.linalg.svdvals(noise)[position])


def _cut_span(names: Sequence[str], states: NamedStates, max_rank: int, deviation: float) -> AttentionSpan:
    """Return the span of the directions above the largest singular value of noise and of rounding."""
    rows = sum(states.shapes[name][0] for name in names)
    columns = states.shapes[names[0]][1]
    edge = _EDGE_MARGIN * deviation * (math.sqrt(rows) + math.sqrt(columns))
    span = AttentionSpan.from_message(names, states, max_rank, edge)
    rank = min(span.rank, max_rank, columns - _MIN_COMPLEMENT)
    return AttentionSpan(gradient=span.gradient, basis=span.basis[:rank], rank=rank, rounding=span.rounding)
