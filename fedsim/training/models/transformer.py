"""Transformers for texts: an encoder and a decoder of the standard form."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveInt, ShareBelowOne
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task
from fedsim.training.models import text_shape


@dataclass(frozen=True, kw_only=True)
class _Transformer(CheckedSettings):
    """Base of both, with their settings."""

    dim: PositiveInt = 128
    heads: PositiveInt = 4
    blocks: PositiveInt = 2
    mlp_ratio: PositiveInt = 4
    dropout: ShareBelowOne = 0.0
    lora_rank: NonNegativeInt = 0

    name: ClassVar[str]
    causal: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads:
            raise ConfigError(f"dim: expected a multiple of heads ({self.heads}), got {self.dim}")
        if self.lora_rank > self.dim:
            raise ConfigError(f"lora_rank: expected at most dim ({self.dim}), got {self.lora_rank}")

    def build(self, task: Task) -> TransformerModule:
        """Build the network for texts of any length."""
        length, vocabulary = text_shape(task, self.name, smallest=1)
        # With adapters, the frozen weights have to be the same for everybody.
        with seed_globals("transformer that everybody has") if self.lora_rank else nullcontext():
            network = TransformerModule(
                length=length,
                vocabulary=vocabulary,
                outputs=task.outputs,
                padding=task.padding,
                causal=self.causal,
                dim=self.dim,
                blocks=self.blocks,
                heads=self.heads,
                mlp_ratio=self.mlp_ratio,
                dropout=self.dropout,
            )
        if self.lora_rank:
            network.add_adapters(self.lora_rank)
        return network


@dataclass(frozen=True, kw_only=True)
class TransformerEncoder(_Transformer):
    """Transformer encoder that classifies texts, in the form of BERT but with GPT-2's norms.

    Embedded words plus learned positions; blocks of multi-head attention and a perceptron with
    GELU, each after a layer norm (pre-norm) and with a shortcut; a last layer norm; the mean over
    all positions; one linear layer. No position attends to padding, and the mean leaves it out. It
    is trained from scratch, so it is small.

    Args:
        dim: length of a word's vector.
        heads: attention heads.
        blocks: number of blocks.
        mlp_ratio: hidden units of each block's perceptron, as a multiple of `dim`. [BERT, GPT-2: 4]
        dropout: probability of dropping a number that a block adds, in [0, 1).     [BERT, GPT-2: 0.1]
        lora_rank: rank of adapters (LoRA) on queries, keys, values and outputs of every attention.
            Only these and the last layer are then trained and sent. The rest is the same network for
            everybody, with random weights; in practice it would be a trained one. 0 trains and sends
            everything.                                                       [Hu et al.: 1 to 64]

    References:
        [Vaswani2017]; [Devlin2019] (BERT); [Radford2019] (GPT-2), Sect. 2.3, for the norms.
    """

    name = "transformer-encoder"
    causal = False


@dataclass(frozen=True, kw_only=True)
class TransformerDecoder(_Transformer):
    """Transformer decoder in the form of GPT-2 that predicts a text's next character, or its class.

    It is like `TransformerEncoder`, but each position attends only to itself and to those before
    it, and the linear layer reads the last position that holds no padding. On LEAF's Shakespeare it
    predicts the next character from the 80 before it, as LEAF's LSTM does. In the last block only
    the last position matters, so three blocks are needed for the first two to have gradients of all
    positions.

    Args:
        dim: length of a word's vector.
        heads: attention heads.
        blocks: number of blocks.
        mlp_ratio: hidden units of each block's perceptron, as a multiple of `dim`. [GPT-2: 4]
        dropout: probability of dropping a number that a block adds, in [0, 1).     [GPT-2: 0.1]
        lora_rank: rank of adapters (LoRA) on queries, keys, values and outputs of every attention.
            Only these and the last layer are then trained and sent. The rest is the same network for
            everybody, with random weights; in practice it would be a trained one. 0 trains and sends
            everything.                                                       [Hu et al.: 1 to 64]

    References:
        [Radford2019] (GPT-2); [Radford2018], Sect. 3.2, for classes read from the last place.
    """

    blocks: PositiveInt = 3

    name = "transformer-decoder"
    causal = True


class TransformerModule(nn.Module):
    """Network that both build; it can be differentiated twice, and for each example.

    Attributes:
        embedding: maps tokens to vectors; its weight is `token dim`, and that of padding is 0 and
            never trained.
        positions: `position dim`, the learned position embeddings.
        blocks: blocks of attention and perceptron.
        causal: whether each position attends only to itself and to those before it.
        lora_rank: rank of the adapters; 0 where there are none.
    """

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        outputs: int,
        padding: int | None,
        causal: bool,
        dim: int,
        blocks: int,
        heads: int,
        mlp_ratio: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.lora_rank = 0
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=padding)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, outputs)
        for weight in (self.embedding.weight, self.positions):
            nn.init.normal_(weight, std=0.02)  # as in GPT-2 and BERT
        if padding is not None:
            nn.init.zeros_(self.embedding.weight[padding])

    def add_adapters(self, rank: int) -> None:
        """Freeze all weights, and add trained adapters to each attention and a new last layer."""
        freeze_parameters(self)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for name in ("query", "key", "value", "output"):
                setattr(block.attention, name, LoraLinear(getattr(block.attention, name), rank))
        self.linear = nn.Linear(self.linear.in_features, self.linear.out_features)
        self.lora_rank = rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `example position [dim]` tokens or embeddings to `example output`."""
        embedded = inputs if inputs.is_floating_point() else self.embedding(inputs)
        is_token = (embedded != 0).any(-1)  # only padding is embedded as 0
        states, mask = self.add_positions(embedded), self.attention_mask(is_token)
        for block in self.blocks:
            states = block(states, mask)
        weights = self._readout_weights(is_token).to(states)
        outputs: Tensor = self.linear((weights[..., None] * self.norm(states)).sum(-2))
        return outputs

    def add_positions(self, embedded: Tensor) -> Tensor:
        """Add position embeddings to `... position dim` embeddings of a text or its beginning."""
        return embedded + self.positions[: embedded.shape[-2]]

    def attention_mask(self, is_token: Tensor) -> Tensor:
        """Return the attention mask.

        Args:
            is_token: `... position`, whether it holds no padding.

        Returns:
            `... position position`, whether the position of the row attends to that of the column.
        """
        mask = is_token[..., None, :].expand(*is_token.shape, is_token.shape[-1])
        return mask.tril() if self.causal else mask

    def _readout_weights(self, is_token: Tensor) -> Tensor:
        """Return the weight of each position in the outputs, `example position`."""
        if self.causal:
            is_next_token = torch.cat([is_token[..., 1:], torch.zeros_like(is_token[..., :1])], -1)
            return is_token & ~is_next_token
        return is_token / is_token.sum(-1, keepdim=True).clamp_min(1)


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a layer norm and with a shortcut."""

    def __init__(self, dim: int, *, heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.perceptron = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map `... position dim` to the same shape.

        Args:
            states: `... position dim`.
            mask: `... position position`, see `TransformerModule.attention_mask`.
        """
        states = states + self.dropout(self.attention(self.norm1(states), mask))
        outputs: Tensor = states + self.dropout(self.perceptron(self.norm2(states)))
        return outputs


class Attention(nn.Module):
    """Multi-head attention step by step: torch's fused kernels cannot be differentiated twice."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Map `... position dim` to the same shape.

        Args:
            inputs: `... position dim`.
            mask: `... position position`, see `TransformerModule.attention_mask`.
        """
        queries = self._split_heads(self.query(inputs))
        keys = self._split_heads(self.key(inputs))
        values = self._split_heads(self.value(inputs))
        scores = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask.unsqueeze(-3), torch.finfo(scores.dtype).min).softmax(-1)
        outputs: Tensor = self.output((weights @ values).transpose(-3, -2).flatten(-2))
        return outputs

    def _split_heads(self, projection: Tensor) -> Tensor:
        """Reshape `... position dim` to `... head position dim`."""
        heads: Tensor = projection.unflatten(-1, (self.heads, -1))
        return heads.transpose(-3, -2)


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained low-rank adapter: base(x) + B A x.

    B is 0 at first, so that nothing is added before training; A is initialised as a linear layer.
    The factor alpha / rank is 1. While B is 0, A has no gradient.

    Attributes:
        base: the frozen layer.
        down: A, `rank in`.
        up: B, `out rank`.

    References:
        [Hu2022], Sect. 4.1.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `... in` to `... out`."""
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


def freeze_parameters(network: nn.Module) -> None:
    """Freeze all parameters of `network`: they are neither trained nor part of any message.

    They become buffers that are not in `state_dict`, so a server and its clients must build the
    same ones.
    """
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach(), persistent=False)
