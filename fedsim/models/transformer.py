"""Transformers for texts: an encoder and a decoder of the field's standard form."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.errors import ConfigError
from fedsim.models import text_shape
from fedsim.models.lora import Adapted, hold
from fedsim.randomness import seeded
from fedsim.task import Task


@dataclass(frozen=True, kw_only=True)
class _Transformer:
    """The settings of both."""

    dim: int = 128
    heads: int = 4
    blocks: int = 2
    mlp_ratio: int = 4
    dropout: float = 0.0
    lora_rank: int = 0

    name: ClassVar[str]
    causal: ClassVar[bool]

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "blocks", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ConfigError(f"dim: expected a multiple of heads ({self.heads}), got {self.dim}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected a value in [0, 1), got {self.dropout}")
        if not 0 <= self.lora_rank <= self.dim:
            raise ConfigError(f"lora_rank: expected a value from 0 to dim ({self.dim}), got {self.lora_rank}")

    def build(self, task: Task) -> TransformerModule:
        """See `ModelPlugin`. Texts of any length."""
        length, vocabulary = text_shape(task, self.name, smallest=1)
        with seeded("transformer that everybody has") if self.lora_rank else nullcontext():
            network = TransformerModule(
                length=length,
                vocabulary=vocabulary,
                outputs=task.outputs,
                padding=task.padding,
                causal=self.causal,
                **{name: getattr(self, name) for name in ("dim", "heads", "blocks", "mlp_ratio", "dropout")},
            )
        if self.lora_rank:
            network.adapt(self.lora_rank)
        return network


@dataclass(frozen=True, kw_only=True)
class TransformerEncoder(_Transformer):
    """Transformer encoder that classifies texts, in the form of BERT but with the norms of GPT-2.

    Embedded words plus learned positions; blocks of multi-head attention and a perceptron with GELU, each behind a
    layer norm (pre-norm) and with a shortcut; a last layer norm; the mean over all places; one linear layer. Places
    that hold padding are attended to by none and are left out of the mean. It is trained from scratch, so it is small.

    Args:
        dim: length of a word's vector.
        heads: attention heads.
        blocks: how many.
        mlp_ratio: hidden units of each block's perceptron, as a multiple of `dim`.        [BERT, GPT-2: 4]
        dropout: probability of dropping a number of what each block adds, in [0, 1).      [BERT, GPT-2: 0.1]
        lora_rank: of adapters (LoRA) on queries, keys, values and outputs of every attention; only these and the last
            layer are then trained and sent. The rest is the same network for everybody, with random weights, where in
            practice it would be a trained one. 0 trains and sends everything.                 [Hu et al.: 1 to 64]

    References:
        Vaswani et al.: Attention Is All You Need, NeurIPS 2017. Devlin et al.: BERT, NAACL 2019. Radford et al.:
        Language Models are Unsupervised Multitask Learners, 2019, Sect. 2.3, for the norms.
    """

    name = "transformer-encoder"
    causal = False


@dataclass(frozen=True, kw_only=True)
class TransformerDecoder(_Transformer):
    """Transformer decoder in the form of GPT-2 that predicts what follows a text: its next character, or its class.

    As `TransformerEncoder`, but each place attends to itself and to those before it, and the linear layer reads the
    last place that holds no padding. On LEAF's Shakespeare that is the next character of 80 before it, as its LSTM
    predicts it. In a last block only the last place matters, so three blocks are needed for the first two to see
    gradients of all places.

    Args:
        dim: length of a word's vector.
        heads: attention heads.
        blocks: how many.
        mlp_ratio: hidden units of each block's perceptron, as a multiple of `dim`.        [GPT-2: 4]
        dropout: probability of dropping a number of what each block adds, in [0, 1).      [GPT-2: 0.1]
        lora_rank: of adapters (LoRA) on queries, keys, values and outputs of every attention; only these and the last
            layer are then trained and sent. The rest is the same network for everybody, with random weights, where in
            practice it would be a trained one. 0 trains and sends everything.                 [Hu et al.: 1 to 64]

    References:
        Radford et al.: Language Models are Unsupervised Multitask Learners, 2019. Radford et al.: Improving Language
        Understanding by Generative Pre-Training, 2018, Sect. 3.2, for classes read from the last place.
    """

    blocks: int = 3

    name = "transformer-decoder"
    causal = True


class TransformerModule(nn.Module):
    """The network that both build, out of plain layers, so that it can be differentiated twice and for each example.

    Attributes:
        embedding: from tokens to vectors; its weight is `token dim`, and that of padding is 0 and never trained.
        positions: `place dim`, what is added at each place.
        blocks: of attention and perceptron.
        causal: each place attends to itself and to those before it alone.
        lora_rank: of the adapters; 0 where there are none.
    """

    def __init__(
        self, *, length: int, vocabulary: int, outputs: int, padding: int | None, causal: bool, dim: int, blocks: int,
        **how: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal = causal
        self.lora_rank = 0
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=padding)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, **how) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, outputs)
        for weight in (self.embedding.weight, self.positions):
            nn.init.normal_(weight, std=0.02)  # GPT-2's and BERT's
        if padding is not None:
            nn.init.zeros_(self.embedding.weight[padding])

    def adapt(self, rank: int) -> None:
        """Hold all weights, and train adapters of each attention and a new last layer instead."""
        hold(self)
        for block in self.blocks:
            assert isinstance(block, Block)
            for name in ("query", "key", "value", "output"):
                setattr(block.attention, name, Adapted(getattr(block.attention, name), rank))
        self.linear = nn.Linear(self.linear.in_features, self.linear.out_features)
        self.lora_rank = rank

    def forward(self, inputs: Tensor) -> Tensor:
        """`example output` for `example place` tokens or `example place dim` embeddings."""
        embedded = inputs if inputs.is_floating_point() else self.embedding(inputs)
        real = (embedded != 0).any(-1)  # padding alone is embedded as 0
        states, seen = self.placed(embedded), self.seen(real)
        for block in self.blocks:
            states = block(states, seen)
        outputs: Tensor = self.linear((self._read(real).to(states)[..., None] * self.norm(states)).sum(-2))
        return outputs

    def placed(self, embedded: Tensor) -> Tensor:
        """`... place dim`, what goes into the first block, for embeddings of as many places or fewer."""
        return embedded + self.positions[: embedded.shape[-2]]

    def seen(self, real: Tensor) -> Tensor:
        """`... place place`: whether the place in the row attends to the one in the column.

        Args:
            real: `... place`, whether it holds no padding.
        """
        seen = real[..., None, :].expand(*real.shape, real.shape[-1])
        return seen.tril() if self.causal else seen

    def _read(self, real: Tensor) -> Tensor:
        """`example place`: by how much the outputs count each place."""
        if self.causal:
            after = torch.cat([real[..., 1:], torch.zeros_like(real[..., :1])], -1)
            return real & ~after
        return real / real.sum(-1, keepdim=True).clamp_min(1)


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and with a shortcut."""

    def __init__(self, dim: int, *, heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.perceptron = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, seen: Tensor) -> Tensor:
        """`... place dim` of the same, and of `... place place`, see `TransformerModule.seen`."""
        states = states + self.dropout(self.attention(self.norm1(states), seen))
        added: Tensor = states + self.dropout(self.perceptron(self.norm2(states)))
        return added


class Attention(nn.Module):
    """Multi-head attention step by step: torch's fused kernels cannot be differentiated twice."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, inputs: Tensor, seen: Tensor) -> Tensor:
        """`... place dim` of the same, and of `... place place`, see `TransformerModule.seen`."""
        projections = (self.query, self.key, self.value)
        queries, keys, values = (p(inputs).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in projections)
        closeness = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
        weights = closeness.masked_fill(~seen.unsqueeze(-3), torch.finfo(closeness.dtype).min).softmax(-1)
        mixed: Tensor = self.output((weights @ values).transpose(-3, -2).flatten(-2))
        return mixed
