"""What the first two blocks of a transformer say of texts: their inputs lie in the span of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adversaries.named_states import NamedStates, named_states
from adversaries.text.embedding import reads_tokens
from fedsim.attacks import Knowledge
from fedsim.errors import AttackError
from fedsim.models.transformer import Block, TransformerModule
from fedsim.wire.messages import Update

MATCHING = "choose 'lamp', which matches gradients"
INSTEAD = "choose 'embedding-rows' for the words alone, or 'lamp', which matches gradients"
"""What an error says where the span gives nothing away."""
SPARE = 8
"""Dimensions that the span must leave: in fewer, what is wrong is too often near to it by chance."""
_DRIFT = 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2
"""Shares of the largest singular value up to which directions may come from inputs that moved in local training."""
_BELOW, _TINY, _LEFT = 8, 1e-9, 1e-4
_AT_ONCE = 1 << 13
"""Places of texts that a block is computed for at once, so that memory stays small."""
_POSSIBLE = 0.1
"""Distance from the first span up to which a word is tried where the embedding does not say which ones occur."""


@dataclass(frozen=True)
class Span:
    """What the gradients of the queries, keys and values of one block span: its inputs, a word at a place each.

    Attributes:
        gradient: `row dim`, of the three weights, one below the other.
        basis: `direction dim`, orthonormal; at least as many as the rank.
        rank: of the gradient, directions that stand out of the rounding.
        rounding: the singular value up to which nothing counts.
    """

    gradient: Tensor
    basis: Tensor
    rank: int
    rounding: float

    @classmethod
    def of(cls, names: Sequence[str], states: NamedStates, most: int, at_least: float = 0.0) -> Span:
        """With directions whose singular value stands out of the rounding of the message.

        A gradient is computed in the precision of the message, with an error below that times its largest singular
        value. Weights that were returned are rounded besides: each number by a uniform error, whose matrix has a
        largest singular value of about its deviation times the sum of the roots of both sides. In several local steps
        the inputs themselves move a little, which adds directions of small singular values: they do not count for the
        rank, as long as it is possible without those below one of `_DRIFT`. In the basis they are kept, up to half of
        the dimensions that so many texts leave, since words that moved are in both.

        Of a gradient, directions just below the rounding are kept in the basis as well, as many as so many texts can
        have: those of texts that the model is sure of are there, and what rounding makes of the others does no harm.

        Args:
            names: of the weights, see `weights_of`.
            states: the message.
            most: rank that so many texts of this length have at most.
            at_least: rounding of a message that this is a part of.
        """
        gradient = torch.cat([states.direction(name, torch.float64) for name in names])
        _, sizes, basis = torch.linalg.svd(gradient, full_matrices=False)
        precision = torch.finfo(states.before[names[0]].dtype).eps
        rounding = max(at_least, precision * float(sizes[0]))
        if states.gradient is None and states.delta is None:
            weights = torch.cat([states.before[name].double() for name in names])
            sides = sum(math.sqrt(side) for side in weights.shape)
            rounding = max(rounding, precision * float(weights.square().mean().sqrt()) * sides / math.sqrt(12))
        above = int((sizes > rounding).sum())
        if states.gradient is None:
            drifts = (share * float(sizes[0]) for share in _DRIFT if above > most)
            rounding = next((drift for drift in drifts if int((sizes > drift).sum()) <= most), rounding)
            kept = min(above, (most + basis.shape[1]) // 2)
        else:
            kept = min(int((sizes > rounding / _BELOW).sum()), most, basis.shape[1] - SPARE)
        rank = int((sizes > rounding).sum())
        kept = max(rank, kept)
        return cls(gradient=gradient, basis=basis[:kept], rank=rank, rounding=rounding)

    def distances(self, inputs: Tensor) -> Tensor:
        """`...`: sine of the angle between each of `... dim` inputs and the span, in [0, 1]."""
        unit = normalize(inputs, dim=-1)
        beside: Tensor = (unit - (unit @ self.basis.T) @ self.basis).norm(dim=-1)
        return beside

    def unexplained(self, inputs: Tensor) -> float:
        """Share of the gradient, by its norm, that `input dim` inputs leave over; below 1e-4 where they are all."""
        if not len(inputs):
            return 1.0
        _, sizes, own = torch.linalg.svd(inputs, full_matrices=False)
        own = own[sizes > _TINY * sizes[0]]
        return float((self.gradient - (self.gradient @ own.T) @ own).norm() / self.gradient.norm())


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The first two blocks of a transformer at w_0, in float64 on the CPU, and what a message says of their inputs.

    Attributes:
        model: the network, at the weights that the server broadcast.
        states: the message under its names.
        words: `word`, tokens that may be claimed, ascending, without padding: those whose row of the embedding moved.
            Where it is held, those whose vector is near to the first span at any place.
        spans: of the first and of the second block.
        length: places of a text.
        padding: the token that fills texts up, or None.
        loss: what clients minimise.
        texts: N.
        where: names the update in errors.
    """

    model: TransformerModule
    states: NamedStates
    words: Tensor
    spans: tuple[Span, Span]
    length: int
    padding: int | None
    loss: Callable[[Tensor, Tensor], Tensor]
    texts: int
    where: str

    @classmethod
    def of(cls, update: Update, knowledge: Knowledge) -> Blocks:
        """As `update` shows them.

        Raises:
            AttackError: the model is none whose blocks are read, or nothing moved, or the gradients' rank is too high.
            TranscriptError: the update is not one of this model, as where the vocabularies differ.
        """
        where = f"round {update.round}, client {update.client}"
        model = _readable(reads_tokens(knowledge)[0], knowledge, where)
        states = named_states(update, model, where)
        model.load_state_dict({**model.state_dict(), **states.before})
        model = model.double().requires_grad_(False)
        assert knowledge.input_shape is not None
        assert knowledge.loss is not None
        most = update.num_examples * knowledge.input_shape[0]
        spans = (Span.of(weights_of(model, 0), states, most), Span.of(weights_of(model, 1), states, most))
        blocks = cls(
            model=model,
            states=states,
            words=torch.empty(0, dtype=torch.int64),
            spans=spans,
            length=knowledge.input_shape[0],
            padding=model.embedding.padding_idx,
            loss=knowledge.loss,
            texts=update.num_examples,
            where=where,
        )
        blocks._check()
        blocks = replace(blocks, words=blocks._possible())
        if not len(blocks.words):
            raise AttackError(
                f"{where}: no word's vector lies in the span of the first block's gradients; choose another round or "
                "attack"
            )
        return blocks

    def _possible(self) -> Tensor:
        """`word`, tokens that may occur: whose row moved, or where the embedding is held, those near to the span."""
        if self.embedding_moved:
            possible = (self.states.direction("embedding.weight") != 0).any(1)
        else:
            every = torch.arange(self.model.embedding.num_embeddings)
            parts = (replace(self, words=some) for some in torch.split(every, _AT_ONCE // self.length or 1))
            near = [part.spans[0].distances(part.block(0).norm1(part.vectors)).amin(1) < _POSSIBLE for part in parts]
            possible = torch.cat(near)
        if self.padding is not None:
            possible[self.padding] = False
        return possible.nonzero()[:, 0]

    def _check(self) -> None:
        if not (self.embedding_moved or self.model.causal):
            raise AttackError(
                f"{self.where}: an encoder's texts are searched for from the gradient of its embedding, which is held "
                f"or was not sent; {MATCHING}"
            )
        rows, dim = self.spans[0].gradient.shape
        texts, rank = self.texts, max(span.rank for span in self.spans)
        lora, readable = self.model.lora_rank, min(dim - SPARE, rows - 1)
        if not min(span.rank for span in self.spans):
            why = ", as those of LoRA do not while their second matrices are 0" if lora else ""
            raise AttackError(
                f"{self.where}: the weights by which attention takes its inputs did not move in both of the first two "
                f"blocks{why}, so nothing says which words there are; choose another round or attack"
            )
        if rank > self.most:
            raise AttackError(
                f"{self.where}: the gradients of the attention span {rank} dimensions, but {texts} texts of "
                f"{self.length} words span {self.most} at most: noise, compression, weight decay, long local training "
                f"or an optimizer such as Adam has made of the update what is not low-rank; {self.instead}"
            )
        if rank > readable:
            of = f"{rows} dimensions, of adapters of rank {lora}" if readable < dim - SPARE else f"{dim} dimensions"
            fewer = f"about {readable // self.length} would not be" if readable >= self.length else "and even one is"
            raise AttackError(
                f"{self.where}: the gradients of the attention span {rank} of {of}, and those of up to "
                f"{readable} can be read: {texts} texts of {self.length} words are too many for this model, {fewer}, "
                f"unless a defense has added what is not of texts; {self.instead}"
            )

    @property
    def embedding_moved(self) -> bool:
        """Whether the message names the words that occur; not where the embedding is held."""
        return not self.model.lora_rank and bool(self.states.direction("embedding.weight").any())

    @property
    def instead(self) -> str:
        """What an error says where the span gives nothing away."""
        return INSTEAD if self.embedding_moved else MATCHING

    def coarse(self) -> Blocks:
        """The same in float32, in which a search takes half the time."""
        spans = [replace(span, basis=span.basis.float()) for span in self.spans]
        return replace(self, model=deepcopy(self.model).float(), spans=(spans[0], spans[1]))

    @property
    def most(self) -> int:
        """Words that all texts together have at most."""
        return self.texts * self.length

    def block(self, number: int) -> Block:
        """One of the two."""
        block = self.model.blocks[number]
        assert isinstance(block, Block)
        return block

    @property
    def vectors(self) -> Tensor:
        """`word place dim`: what goes into the first block for each word at each place."""
        vectors: Tensor = self.model.embedding(self.words)[:, None] + self.model.positions[: self.length]
        return vectors

    def second_inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`text place dim` inputs of the second block's attention, and `text place`, which places hold words."""
        embedded = self.model.embedding(tokens)
        real = (embedded != 0).any(-1)
        states = self.block(0)(self.model.placed(embedded), self.model.seen(real))
        inputs: Tensor = self.block(1).norm1(states)
        return inputs, real

    def misfits(self, tokens: Tensor) -> Tensor:
        """`text`: root mean square, over the words of each text, of the distances in the second block."""
        found = []
        for some in torch.split(tokens, max(1, _AT_ONCE // self.length)):
            inputs, real = self.second_inputs(some)
            squares = self.spans[1].distances(inputs).square() * real
            found.append((squares.sum(1) / real.sum(1).clamp_min(1)).sqrt())
        return torch.cat(found)

    def unexplained(self, tokens: Tensor) -> float:
        """Share of the second block's gradient that these texts leave over."""
        inputs, real = self.second_inputs(tokens)
        return self.spans[1].unexplained(inputs[real])

    def without(self, text: Tensor) -> Blocks | None:
        """What is left of the message without one text, or None where that cannot be told.

        A client that sends a gradient sends the mean of those of its texts, and that of a known text is known but for
        its class: it is the one without which least is left of the row of one of its words in the embedding. A text
        can be taken out that leaves nothing of a row, or without which the second block spans less.
        """
        held = torch.isin(self.words, text)
        if (sent := self.states.gradient) is None or not held.any():
            return None
        network = deepcopy(self.model).requires_grad_(True)
        names, weights = zip(*network.named_parameters(), strict=True)
        before = self._rows(self.states)
        least, states = math.inf, self.states
        for label in range(network.linear.out_features):
            with torch.enable_grad():
                slopes = torch.autograd.grad(self.loss(network(text[None]), torch.tensor([label])), weights)
            rest = {name: sent[name].double() - slope / self.texts for name, slope in zip(names, slopes, strict=True)}
            without = self.states._replace(gradient=rest)
            left = float((self._rows(without) / before)[held].min())
            if left < least:
                least, states = left, without
        second = Span.of(weights_of(network, 1), states, self.most, self.spans[1].rounding)
        if least > _LEFT and second.rank >= self.spans[1].rank:
            return None
        first = Span.of(weights_of(network, 0), states, self.most, self.spans[0].rounding)
        words = self.words[self._rows(states) > _LEFT * before]
        return replace(self, states=states, words=words, spans=(first, second))

    def _rows(self, states: NamedStates) -> Tensor:
        """`word`, norm of the row in the embedding's gradient."""
        norms: Tensor = states.direction("embedding.weight", torch.float64)[self.words].norm(dim=1)
        return norms

    def labels(self, tokens: Tensor) -> Tensor:
        """`text`: the class whose logit the update moved up most for it.

        The last layer's gradient is the sum over texts of the slope of each one's logits times its features; with the
        cross-entropy only the slope of the true class is below 0. Slopes are found by least squares, which is exact
        for one step, where all texts are found.
        """
        features: list[Tensor] = []
        hook = self.model.linear.register_forward_pre_hook(lambda _, given: features.append(given[0]))
        self.model(tokens)
        hook.remove()
        weight, bias = (self.states.direction(f"linear.{what}", torch.float64) for what in ("weight", "bias"))
        moved = torch.cat([weight, bias[:, None]], 1)
        given = torch.cat([features[0], torch.ones_like(features[0][:, :1])], 1)
        slopes: Tensor = torch.linalg.lstsq(given.T, moved.T, driver="gelsd").solution
        return slopes.argmin(1)


def weights_of(model: TransformerModule, block: int) -> list[str]:
    """Names of the weights of a block by which its attention takes its inputs: theirs are the gradients' rows."""
    which = "down.weight" if model.lora_rank else "weight"
    return [f"blocks.{block}.attention.{what}.{which}" for what in ("query", "key", "value")]


def _readable(model: nn.Module, knowledge: Knowledge, where: str) -> TransformerModule:
    """`model`, if its form is one whose blocks are read.

    Raises:
        AttackError: it is not.
    """
    if not isinstance(model, TransformerModule):
        raise AttackError(
            f"{where}: the model is a {type(model).__name__}, expected one of transformer-encoder and "
            f"transformer-decoder, whose blocks are read; {INSTEAD}"
        )
    if len(model.blocks) < (needed := 3 if model.causal else 2):
        raise AttackError(
            f"{where}: the transformer has {len(model.blocks)} blocks, and {needed} are needed for the second one "
            f"to have a gradient at all places; {INSTEAD}"
        )
    if (length := len(model.positions)) != (knowledge.input_shape or ())[0]:
        raise AttackError(
            f"{where}: the model takes texts of {length} tokens, and input_shape is {knowledge.input_shape}; grant the "
            "federation's input_shape"
        )
    if model.linear.out_features < 2:
        raise AttackError(
            f"{where}: the model predicts one number, expected a logit for each class, from which labels are read; "
            f"{INSTEAD}"
        )
    return model
