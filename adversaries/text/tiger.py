"""Texts of a decoder from noised attention gradients, by distance to their span (idea of TIGER) [Kalikman2026]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.text.attention_span import (
    AttentionBlocks,
    AttentionSpan,
    attention_weight_names,
    check_blocks,
    check_num_texts,
)
from adversaries.text.decoder_search import DecoderSearch
from adversaries.text.embedding import find_token_embedding
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Attack, Paper, Progress, Subject, Target, warn
from fedsim.interfaces.findings import Texts
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.message_noise import TrainingFacts, combine_noise
from fedsim.inversion.named_states import NamedStates, named_states
from fedsim.inversion.problem import warn_of_dropout
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerModule
from fedsim.training.settings import known_steps

_EDGE_MARGIN = 1.02
"""The largest singular value of noise fluctuates by about 1 % around its expectation."""
_MIN_COMPLEMENT = 8
"""Least dimension of the complement; with fewer, all words are near the span."""
_LEAST_DIFFERENCE = 0.5
"""Two claimed texts differ in at least this share of their words."""


@dataclass(frozen=True, kw_only=True)
class Tiger(Attack):
    """Rank texts of a decoder by the distance of their words from the spans of noised gradients.

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
    4. Build texts word by word in a beam search. The score of a text is the sum over its words of
       the squared distances from both spans (`DecoderSearch.rank_texts`).
    5. Claim the best texts of the beam that differ in at least half of their words (`_pick_texts`).
       Each has as many words as the model takes: the ends of shorter texts are not looked for, and
       what is claimed beyond them is arbitrary.
    6. Read the labels from the last layer's gradient (`AttentionBlocks.recover_labels`).

    A text that is claimed is the best guess, and nothing says that it is right: another one may come
    nearer by chance. Returned weights are read like a gradient, which assumes plain SGD.

    Args:
        words: most words that are tried.
        beam: texts that are kept at each position, as a multiple of N.

    References:
        [Kalikman2026]. Only its abstract and the beginning of its introduction could be had, so all
        steps are guessed but the idea of a continuous distance from the span. Differs: the paper
        optimises embeddings of words by the gradient of that distance, where a beam search ranks words
        here; the paper attacks encoders too, which are refused, as are adapters (LoRA).
    """

    words: PositiveInt = 300
    beam: PositiveInt = 32

    paper: ClassVar[Paper] = cite("Kalikman2026")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape"})
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | {"defenses"}
    subject: ClassVar[Subject] = "texts"

    def _run(self, target: Target, progress: Progress) -> Texts:
        update, knowledge = target.read_update(), target.knowledge
        check_num_texts(update)
        blocks = self._read_blocks(update, knowledge, target.rng)
        warn_of_dropout(self, blocks.model, knowledge, blocks.where)
        num_texts, steps = update.num_examples, count(1)
        with torch.no_grad():

            def report(mean_square: float) -> None:
                progress(next(steps), blocks.length, {"objective": mean_square})

            tokens = DecoderSearch(blocks, num_texts).rank_texts(self.beam * num_texts, report)
            tokens = _pick_texts(tokens, num_texts)
            if len(tokens) < num_texts:
                warn(
                    f"{self.title} on {blocks.where}: {len(tokens)} texts that differ in half of their words are near "
                    f"the spans, N is {num_texts}; raise beam"
                )
            if not blocks.states.direction("linear.weight").any():
                warn(f"{self.title} on {blocks.where}: the last layer was not sent; labels are guesses")
            return Texts(tokens=tokens, labels=blocks.recover_labels(tokens))

    def _read_blocks(self, update: Update, knowledge: Knowledge, rng: torch.Generator) -> AttentionBlocks:
        """Read the blocks, spans above the noise, and words to try.

        Raises:
            AttackError: the model has another form, or no direction stands out of the noise.
            TranscriptError: the update is not one of this model.
        """
        where = f"round {update.round}, client {update.client}"
        model = check_blocks(find_token_embedding(knowledge)[0], knowledge, where)
        _check_form(model, where)
        states = named_states(update, model, where)
        model.load_state_dict({**model.state_dict(), **states.before})
        model = model.double().requires_grad_(False)
        assert knowledge.input_shape is not None
        assert knowledge.loss is not None
        length = knowledge.input_shape[0]

        spans, max_rank = [], update.num_examples * length
        for block in (0, 1):
            names = attention_weight_names(model, block)
            deviation = _find_deviation(names, states, update, knowledge, max_rank, rng)
            spans.append(_cut_span(names, states, max_rank, deviation))
        if not min(span.rank for span in spans):
            raise AttackError(
                f"{where}: no direction of the attention's gradients stands out of the noise in both of the first two "
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
        return blocks.with_words(self._find_words(blocks))

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


def _check_form(model: TransformerModule, where: str) -> None:
    """Raise AttackError if the model is an encoder or has adapters."""
    if not model.causal:
        raise AttackError(
            f"{where}: the model is an encoder, whose words depend on all others of a text, and texts are ranked word "
            "by word here; choose 'dager', or 'lamp' under noise"
        )
    if model.lora_rank:
        raise AttackError(
            f"{where}: the model is trained by adapters (LoRA), whose few rows leave too little above noise to rank "
            "texts; choose 'dager'"
        )


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


def _pick_texts(tokens: Tensor, num_texts: int) -> Tensor:
    """Return the first texts of a ranking that differ enough from those before them."""
    picked: list[Tensor] = []
    for text in tokens:
        if all(float((text != other).double().mean()) >= _LEAST_DIFFERENCE for other in picked):
            picked.append(text)
    return torch.stack(picked[:num_texts])
