"""The first two blocks of a transformer in a message, with the spans of their inputs (DAGER)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.text.attention_span import (
    MIN_COMPLEMENT,
    AttentionSpan,
    attention_weight_names,
    compute_block_inputs,
    find_span_weights,
    spans_hold,
)
from adversaries.text.embedding import find_token_embedding
from fedsim.base.errors import AttackError
from fedsim.base.module_hooks import hook_inputs
from fedsim.interfaces.attack import Attack, Knowledge, Subject, warn
from fedsim.inversion.named_states import NamedStates, named_states
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerBlock, TransformerModule

_MATCHING_REMEDY = "choose 'lamp', which matches gradients"
_REMEDY = "choose 'embedding-rows' for the words alone, or 'lamp', which matches gradients"
"""Last part of errors where the span is uninformative."""
_EXPLAINED_SHARE = 1e-4
"""Share of an embedding row's gradient that may remain once its texts are subtracted."""
_POSITIONS_PER_CHUNK = 1 << 13
"""Positions of texts for which a block is computed at once, to bound memory."""
_MAX_CANDIDATE_DISTANCE = 0.1
"""Largest distance of a candidate word from the first span, without embedding gradient."""


@dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """The first two blocks of a transformer at w_0, and the spans of their gradients in a message.

    All is in float64 on the CPU.

    Attributes:
        model: the network, at the weights that the server broadcast.
        states: the message under the model's names.
        words: `word`, candidate tokens, ascending, without padding: those with a gradient in the
            embedding. If the embedding has no gradient, those whose input is close to the first
            span at any position.
        spans: of the first and of the second block.
        length: number of positions of a text.
        padding: the padding token, or None.
        loss: the clients' loss.
        num_texts: N.
        where: names the update in errors.
    """

    model: TransformerModule
    states: NamedStates
    words: Tensor
    spans: tuple[AttentionSpan, AttentionSpan]
    length: int
    padding: int | None
    loss: Callable[[Tensor, Tensor], Tensor]
    num_texts: int
    where: str

    @classmethod
    def from_update(cls, update: Update, knowledge: Knowledge) -> AttentionBlocks:
        """Read the blocks and spans of one update."""
        model, states, where = read_transformer(update, knowledge)
        assert knowledge.input_shape is not None
        assert knowledge.loss is not None
        max_rank = update.num_examples * knowledge.input_shape[0]
        spans = []
        for block in (0, 1):
            names, projection = find_span_weights(model, block, states, max_rank)
            spans.append(replace(AttentionSpan.from_message(names, states, max_rank), projection=projection))
        blocks = cls(
            model=model,
            states=states,
            words=torch.empty(0, dtype=torch.int64),
            spans=(spans[0], spans[1]),
            length=knowledge.input_shape[0],
            padding=model.embedding.padding_idx,
            loss=knowledge.loss,
            num_texts=update.num_examples,
            where=where,
        )
        blocks._check_spans()
        blocks = blocks.with_words(blocks._find_candidate_words())
        if not len(blocks.words):
            raise AttackError(
                f"{where}: no word's vector lies in the span of the first block's gradients; choose another round or "
                "attack"
            )
        return blocks

    def _find_candidate_words(self) -> Tensor:
        """Return tokens with an embedding gradient, or without any, those close to the span."""
        if self.has_embedding_gradient:
            is_candidate = (self.states.direction("embedding.weight") != 0).any(1)
        else:
            vocabulary = self.with_words(torch.arange(self.model.embedding.num_embeddings))
            is_candidate = vocabulary.first_span_distances().amin(1) < _MAX_CANDIDATE_DISTANCE
        if self.padding is not None:
            is_candidate[self.padding] = False
        return is_candidate.nonzero()[:, 0]

    def with_words(self, words: Tensor) -> AttentionBlocks:
        """Return the same blocks with other candidate words."""
        return replace(self, words=words)

    def first_span_distances(self) -> Tensor:
        """Return the distance of each word's input at each position from the first span, `word position`."""
        distances = []
        for words in torch.split(self.words, _POSITIONS_PER_CHUNK // self.length or 1):
            inputs = self.block(0).norm1(self.with_words(words).first_block_inputs)
            distances.append(self.spans[0].distances(inputs))
        return torch.cat(distances)

    def _check_spans(self) -> None:
        """Raise AttackError if the spans do not determine words."""
        rows, dim = self.spans[0].gradient.shape
        texts, rank = self.num_texts, max(span.rank for span in self.spans)
        lora, readable = self.model.lora_rank, min(dim - MIN_COMPLEMENT, rows - 1)
        if not min(span.rank for span in self.spans):
            raise AttackError(
                f"{self.where}: the input weights of attention did not change in both of the first two "
                "blocks, so they do not reveal words; choose another round or attack"
            )
        if rank > self.max_words:
            raise AttackError(
                f"{self.where}: the gradients of the attention span {rank} dimensions, but {texts} texts of "
                f"{self.length} words span {self.max_words} at most: noise, compression, weight decay, "
                "long local training or an optimizer such as Adam has made the update full-rank; choose 'tiger', which "
                "allows for noise, or 'lamp', which matches gradients"
            )
        if rank > readable:
            space = f"{dim} dimensions"
            if lora:
                space = f"{min(rows, dim)} dimensions, of adapters of rank {lora}"
            fewer = f"about {readable // self.length} would not be" if readable >= self.length else "and even one is"
            raise AttackError(
                f"{self.where}: the gradients of the attention span {rank} of {space}, and those of up to "
                f"{readable} can be read: {texts} texts of {self.length} words are too many for this model, {fewer}, "
                f"unless a defense has added directions that are not of texts; {self.remedy}"
            )

    @property
    def has_embedding_gradient(self) -> bool:
        """Return whether the embedding has a gradient, which names the words that occur."""
        return not self.model.lora_rank and bool(self.states.direction("embedding.weight").any())

    @property
    def remedy(self) -> str:
        """Return the last part of errors where the spans are uninformative."""
        return _REMEDY if self.has_embedding_gradient else _MATCHING_REMEDY

    def to_float32(self) -> AttentionBlocks:
        """Convert model and bases to float32, in which a search takes half the time."""
        spans = self.spans[0].to_float32(), self.spans[1].to_float32()
        return replace(self, model=deepcopy(self.model).float(), spans=spans)

    @property
    def max_words(self) -> int:
        """Return the largest number of words in all texts together."""
        return self.num_texts * self.length

    def block(self, number: int) -> TransformerBlock:
        """Return block 0 or 1."""
        block = self.model.blocks[number]
        assert isinstance(block, TransformerBlock)
        return block

    @property
    def first_block_inputs(self) -> Tensor:
        """Return each word's input to the first block at each position, `word position dim`."""
        vectors: Tensor = self.model.embedding(self.words)[:, None] + self.model.positions[: self.length]
        return vectors

    def second_block_inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the inputs of the second block's attention.

        Returns:
            `text position dim`, and whether a position holds a word, `text position`.
        """
        _, inputs, is_word = compute_block_inputs(self.model, tokens)
        return inputs, is_word

    def misfits(self, tokens: Tensor) -> Tensor:
        """Return each text's RMS distance of its words from the second span, `text`."""
        misfits = []
        for texts in torch.split(tokens, max(1, _POSITIONS_PER_CHUNK // self.length)):
            inputs, is_word = self.second_block_inputs(texts)
            squares = self.spans[1].distances(inputs).square() * is_word
            misfits.append((squares.sum(1) / is_word.sum(1).clamp_min(1)).sqrt())
        return torch.cat(misfits)

    def unexplained_share(self, tokens: Tensor) -> float:
        """Return the share of the second block's gradient that these texts do not explain."""
        inputs, is_word = self.second_block_inputs(tokens)
        return self.spans[1].unexplained_share(inputs[is_word])

    def subtract_text(self, text: Tensor) -> AttentionBlocks | None:
        """Subtract one text from the message; return None if it is not part of it.

        A client that sends a gradient sends the mean over its texts, and the gradient of a known
        text is determined up to its class: the class is the one whose subtraction leaves least of
        one of its words' rows in the embedding. A text is part of the message if the subtraction
        leaves nothing of a row, or lowers the rank of the second span.
        """
        in_text = torch.isin(self.words, text)
        if (sent_gradient := self.states.gradient) is None or not in_text.any():
            return None
        network = deepcopy(self.model).requires_grad_(True)
        names, weights = zip(*network.named_parameters(), strict=True)
        original_norms = self._row_norms(self.states)

        # Choose the class whose gradient explains a row best.
        smallest_share, states = math.inf, self.states
        for label in range(network.linear.out_features):
            with torch.enable_grad():
                gradients = torch.autograd.grad(self.loss(network(text[None]), torch.tensor([label])), weights)
            difference = {}
            for name, gradient in zip(names, gradients, strict=True):
                difference[name] = sent_gradient[name].double() - gradient / self.num_texts
            remaining_states = self.states._replace(gradient=difference)
            remaining_share = float((self._row_norms(remaining_states) / original_norms)[in_text].min())
            if remaining_share < smallest_share:
                smallest_share, states = remaining_share, remaining_states

        second = AttentionSpan.from_message(
            attention_weight_names(network, 1), states, self.max_words, self.spans[1].rounding
        )
        if smallest_share > _EXPLAINED_SHARE and second.rank >= self.spans[1].rank:
            return None
        first = AttentionSpan.from_message(
            attention_weight_names(network, 0), states, self.max_words, self.spans[0].rounding
        )
        words = self.words[self._row_norms(states) > _EXPLAINED_SHARE * original_norms]
        return replace(self, states=states, words=words, spans=(first, second))

    def _row_norms(self, states: NamedStates) -> Tensor:
        """Return the norms of the words' rows in the embedding's gradient, `word`."""
        norms: Tensor = states.direction("embedding.weight", torch.float64)[self.words].norm(dim=1)
        return norms

    def recover_labels(self, tokens: Tensor) -> Tensor:
        """Return for each text the class whose logit the update raised most, `text`.

        The last layer's gradient is the sum over texts of the logits' gradient times the features;
        with the cross-entropy only the entry of the true class is negative. The logits' gradients
        are solved for by least squares, which is exact after one step if all texts are found.
        """
        features: list[Tensor] = []
        with hook_inputs(self.model.linear, lambda _, inputs: features.append(inputs[0])):
            self.model(tokens)
        weight = self.states.direction("linear.weight", torch.float64)
        bias = self.states.direction("linear.bias", torch.float64)
        layer_gradient = torch.cat([weight, bias[:, None]], 1)
        layer_inputs = torch.cat([features[0], torch.ones_like(features[0][:, :1])], 1)
        logit_gradients: Tensor = torch.linalg.lstsq(layer_inputs.T, layer_gradient.T, driver="gelsd").solution
        return logit_gradients.argmin(1)


@dataclass(frozen=True, kw_only=True)
class TransformerAttack(Attack):
    """Base of the attacks that read texts from the gradients of a transformer's first two blocks."""

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape"})
    subject: ClassVar[Subject] = "texts"

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network that is no transformer of the form that it reads."""
        find_transformer(knowledge)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages without a part of the transformer."""
        read_transformer(update, knowledge)

    def _warn_of_gaps(self, blocks: AttentionBlocks, count: int) -> None:
        """Warn where only `count` texts are found, or where nothing says what their labels are."""
        if count < blocks.num_texts:
            warn(
                f"{self.title} on {blocks.where}: {count} texts are found, N is {blocks.num_texts}; equal texts count "
                "once"
            )
        if not blocks.states.direction("linear.weight").any():
            warn(f"{self.title} on {blocks.where}: the last layer was not sent; labels are guesses")


def check_num_texts(update: Update) -> None:
    """Raise AttackError where a client reports no examples."""
    if update.num_examples < 1:
        raise AttackError(
            f"{update.name}: N is {update.num_examples}, so nothing says how many texts "
            "to look for; attack a client that reports its num_examples"
        )


def read_transformer(update: Update, knowledge: Knowledge) -> tuple[TransformerModule, NamedStates, str]:
    """Return the transformer at w_0 in float64, the message under its names, and what to call the message in errors."""
    where = update.name
    model = find_transformer(knowledge, where)
    states = named_states(update, model, where)
    model.load_state_dict({**model.state_dict(), **states.before})
    model.double()
    assert knowledge.loss is not None
    if not spans_hold(model, knowledge.loss):
        raise AttackError(
            f"{where}: a text's gradient in this network is not that of attention that reads its words once: a block "
            f"or a weight is used twice, or its inputs are others; {_MATCHING_REMEDY}"
        )
    return model.requires_grad_(False), states, where


def find_transformer(knowledge: Knowledge, where: str = "the network") -> TransformerModule:
    """Build the network and return it if its blocks can be read."""
    model = find_token_embedding(knowledge)[0]
    if not isinstance(model, TransformerModule):
        raise AttackError(
            f"{where}: the model is a {type(model).__name__}, expected one of transformer-encoder and "
            f"transformer-decoder, whose blocks are read; {_REMEDY}"
        )
    if len(model.blocks) < (needed := 3 if model.causal else 2):
        raise AttackError(
            f"{where}: the transformer has {len(model.blocks)} blocks, and {needed} are needed for the second one "
            f"to have a gradient at all places; {_REMEDY}"
        )
    if (length := len(model.positions)) != (knowledge.input_shape or ())[0]:
        raise AttackError(
            f"{where}: the model takes texts of {length} tokens, and input_shape is {knowledge.input_shape}; grant the "
            "federation's input_shape"
        )
    if model.linear.out_features < 2:
        raise AttackError(
            f"{where}: the model predicts one number, expected a logit for each class, from which labels are read; "
            f"{_REMEDY}"
        )
    return model
