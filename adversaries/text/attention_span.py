"""Spans of a transformer's attention gradients, which contain its blocks' inputs (DAGER)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adversaries.text.embedding import find_token_embedding
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.named_states import NamedStates, named_states
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerBlock, TransformerModule

_MATCHING_REMEDY = "choose 'lamp', which matches gradients"
_REMEDY = "choose 'embedding-rows' for the words alone, or 'lamp', which matches gradients"
"""Last part of errors where the span is uninformative."""
_MIN_COMPLEMENT = 8
"""Least dimension of the complement; with fewer, wrong words are near the span by chance."""
_DRIFT_SHARES = 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2
"""Shares of the largest singular value below which directions may come from local drift."""
_ROUNDING_MARGIN = 8
"""In the basis of a gradient's span, directions down to the rounding divided by it are kept."""
_NEGLIGIBLE = 1e-9
"""Singular values of inputs below this share of the largest count as zero."""
_EXPLAINED_SHARE = 1e-4
"""Share of an embedding row's gradient that may remain once its texts are subtracted."""
_POSITIONS_PER_CHUNK = 1 << 13
"""Positions of texts for which a block is computed at once, to bound memory."""
_MAX_CANDIDATE_DISTANCE = 0.1
"""Largest distance of a candidate word from the first span, without embedding gradient."""


@dataclass(frozen=True)
class AttentionSpan:
    """The span of one block's query, key and value gradients, which contains the block's inputs.

    Attributes:
        gradient: `row dim`, of the three weights, one below the other.
        basis: `direction dim`, orthonormal; at least `rank` directions.
        rank: of the gradient, number of singular values above the rounding.
        rounding: singular values up to it are rounding errors.
        projection: `feature dim`, of inputs to what the span contains; None if that is the inputs.
            The rows of `gradient` and `basis` are then features.
    """

    gradient: Tensor
    basis: Tensor
    rank: int
    rounding: float
    projection: Tensor | None = None

    @classmethod
    def from_message(
        cls, names: Sequence[str], states: NamedStates, max_rank: int, min_rounding: float = 0.0
    ) -> AttentionSpan:
        """Compute the span of those directions that exceed the rounding of the message.

        A gradient is computed in the precision of the message, with an error below that precision
        times its largest singular value. Returned weights are rounded as well: each number by a
        uniform error, whose matrix has a largest singular value of about its deviation times the
        sum of the roots of both sides. In several local steps the inputs themselves drift, which
        adds directions with small singular values: they do not count for the rank, if one of
        `_DRIFT_SHARES` separates them. The basis contains them, up to half of the dimensions beyond
        `max_rank`, since words that drifted have components in both.

        The basis of a gradient also contains directions just below the rounding, up to `max_rank`:
        those of texts that the model is confident of are there, and rounding errors do no harm.

        Args:
            names: of the weights, see `attention_weight_names`.
            states: the message.
            max_rank: largest rank for the client's number of words.
            min_rounding: rounding of the message that `states` are a part of.
        """
        gradient = torch.cat([states.direction(name, torch.float64) for name in names])
        _, singular_values, basis = torch.linalg.svd(gradient, full_matrices=False)

        # Estimate the rounding of the message.
        precision = torch.finfo(states.before[names[0]].dtype).eps
        rounding = max(min_rounding, precision * float(singular_values[0]))
        if states.gradient is None and states.delta is None:
            weights = torch.cat([states.before[name].double() for name in names])
            sides = sum(math.sqrt(side) for side in weights.shape)
            rounding = max(rounding, precision * float(weights.square().mean().sqrt()) * sides / math.sqrt(12))

        # Count the directions of the rank and of the basis.
        num_above = int((singular_values > rounding).sum())
        if states.gradient is None:
            if num_above > max_rank:
                for share in _DRIFT_SHARES:
                    drift = share * float(singular_values[0])
                    if int((singular_values > drift).sum()) <= max_rank:
                        rounding = drift
                        break
            basis_size = min(num_above, (max_rank + basis.shape[1]) // 2)
        else:
            num_near_rounding = int((singular_values > rounding / _ROUNDING_MARGIN).sum())
            basis_size = min(num_near_rounding, max_rank, basis.shape[1] - _MIN_COMPLEMENT)
        rank = int((singular_values > rounding).sum())
        basis_size = max(rank, basis_size)
        return cls(gradient=gradient, basis=basis[:basis_size], rank=rank, rounding=rounding)

    def distances(self, inputs: Tensor) -> Tensor:
        """Return the sine of the angle between each of `... dim` inputs and the span, in [0, 1]."""
        unit = normalize(self._features(inputs), dim=-1)
        sine: Tensor = (unit - (unit @ self.basis.T) @ self.basis).norm(dim=-1)
        return sine

    def unexplained_share(self, inputs: Tensor) -> float:
        """Return the share of the gradient's norm outside of the span of `input dim` inputs.

        It is below 1e-4 if the inputs are complete.
        """
        if not len(inputs):
            return 1.0
        _, singular_values, directions = torch.linalg.svd(self._features(inputs), full_matrices=False)
        basis = directions[singular_values > _NEGLIGIBLE * singular_values[0]]
        return float((self.gradient - (self.gradient @ basis.T) @ basis).norm() / self.gradient.norm())

    def to_float32(self) -> AttentionSpan:
        """Convert what distances are computed with to float32."""
        projection = None if self.projection is None else self.projection.float()
        return replace(self, basis=self.basis.float(), projection=projection)

    def _features(self, inputs: Tensor) -> Tensor:
        """Return what the span contains of `... dim` inputs."""
        return inputs if self.projection is None else inputs @ self.projection.T


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
        """Read the blocks and spans of one update.

        Raises:
            AttackError: the model has another form, nothing moved, or the gradients' rank is too
                high.
            TranscriptError: the update is not one of this model, for instance of another
                vocabulary.
        """
        where = f"round {update.round}, client {update.client}"
        model = check_blocks(find_token_embedding(knowledge)[0], knowledge, where)
        states = named_states(update, model, where)
        model.load_state_dict({**model.state_dict(), **states.before})
        model = model.double().requires_grad_(False)
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
        if not (self.has_embedding_gradient or self.model.causal):
            raise AttackError(
                f"{self.where}: an encoder's texts are searched for from the gradient of its embedding, which is "
                f"frozen or was not sent; {_MATCHING_REMEDY}"
            )
        rows, dim = self.spans[0].gradient.shape
        texts, rank = self.num_texts, max(span.rank for span in self.spans)
        lora, readable = self.model.lora_rank, min(dim - _MIN_COMPLEMENT, rows - 1)
        if not min(span.rank for span in self.spans):
            raise AttackError(
                f"{self.where}: the weights by which attention takes its inputs did not move in both of the first two "
                "blocks, so nothing says which words there are; choose another round or attack"
            )
        if rank > self.max_words:
            raise AttackError(
                f"{self.where}: the gradients of the attention span {rank} dimensions, but {texts} texts of "
                f"{self.length} words span {self.max_words} at most: noise, compression, weight decay, "
                "long local training "
                f"or an optimizer such as Adam has made the update full-rank; {self.remedy}"
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
        embedded = self.model.embedding(tokens)
        is_word = (embedded != 0).any(-1)
        states = self.block(0)(self.model.add_positions(embedded), self.model.attention_mask(is_word))
        inputs: Tensor = self.block(1).norm1(states)
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
        hook = self.model.linear.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        self.model(tokens)
        hook.remove()
        weight = self.states.direction("linear.weight", torch.float64)
        bias = self.states.direction("linear.bias", torch.float64)
        layer_gradient = torch.cat([weight, bias[:, None]], 1)
        layer_inputs = torch.cat([features[0], torch.ones_like(features[0][:, :1])], 1)
        logit_gradients: Tensor = torch.linalg.lstsq(layer_inputs.T, layer_gradient.T, driver="gelsd").solution
        return logit_gradients.argmin(1)


def attention_weight_names(model: TransformerModule, block: int) -> list[str]:
    """Return the names of the query, key and value weights that take the block's inputs."""
    suffix = "down.weight" if model.lora_rank else "weight"
    return [f"blocks.{block}.attention.{projection}.{suffix}" for projection in ("query", "key", "value")]


def find_span_weights(
    model: TransformerModule, block: int, states: NamedStates, max_rank: int
) -> tuple[list[str], Tensor | None]:
    """Return the names of the weights whose gradients span a block's inputs, and a projection of these.

    With adapters, B A beside a frozen matrix, the gradient of A spans the inputs x, and is 0 while B
    is 0. The gradient of the value's B spans A x, `lora_rank` numbers, from the first round on. It
    is read if B is 0, or if the words leave enough of these dimensions.
    """
    value = f"blocks.{block}.attention.value"
    if model.lora_rank:
        is_zero = not bool(states.before[f"{value}.up.weight"].any())
        if is_zero or max_rank <= model.lora_rank - _MIN_COMPLEMENT:
            return [f"{value}.up.weight"], states.before[f"{value}.down.weight"].double()
    return attention_weight_names(model, block), None


def check_num_texts(update: Update) -> None:
    """Raise AttackError where a client reports no examples."""
    if update.num_examples < 1:
        raise AttackError(
            f"round {update.round}, client {update.client}: N is {update.num_examples}, so nothing says how many texts "
            "to look for; attack a client that reports its num_examples"
        )


def check_blocks(model: nn.Module, knowledge: Knowledge, where: str) -> TransformerModule:
    """Return `model` if its blocks can be read.

    Raises:
        AttackError: they cannot.
    """
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
