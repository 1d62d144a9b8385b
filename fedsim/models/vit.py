"""Vision transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.errors import ConfigError
from fedsim.models import image_shape, unsuited
from fedsim.task import Task


@dataclass(frozen=True, kw_only=True)
class VitApril:
    """Vision transformer of type A of Lu et al. 2022 (APRIL), as SME, App. G, attacks it.

    Its first block applies attention directly to the embedded patches, without normalisation and
    shortcut, which makes APRIL's closed form possible; the other blocks normalise first. The head is
    layer norm - linear - GELU - linear on the class token. The class token and the positions start at
    zero. Sizes are those of SME's released code; SME's text names none, nor a patch size.

    Args:
        patch: pixels of a patch's side; by default the whole image is one patch, as in SME's released code.
        dim: length of a token's embedding.
        heads: attention heads.
        blocks: number of blocks.
        mlp_ratio: hidden units of each block's perceptron, and of the head, as a multiple of `dim`.
    """

    patch: int | None = None
    dim: int = 384
    heads: int = 4
    blocks: int = 4
    mlp_ratio: int = 2

    def __post_init__(self) -> None:
        if min(self.dim, self.heads, self.blocks, self.mlp_ratio) < 1:
            raise ConfigError(
                "dim, heads, blocks and mlp_ratio: expected at least 1 each, "
                f"got {self.dim}, {self.heads}, {self.blocks} and {self.mlp_ratio}"
            )
        if self.dim % self.heads:
            raise ConfigError(f"dim: expected a multiple of heads ({self.heads}), got {self.dim}")
        if self.patch is not None and self.patch < 1:
            raise ConfigError(f"patch: expected at least 1, got {self.patch}")

    def build(self, task: Task) -> nn.Module:
        """See `ModelPlugin`. Images whose height and width are multiples of `patch`."""
        channels, height, width = image_shape(task, "vit-april", smallest=self.patch or 1)
        if self.patch and (height % self.patch or width % self.patch):
            takes = f"images whose sides are multiples of {self.patch}"
            raise unsuited(task, "vit-april", takes, "another patch")
        patch = (self.patch, self.patch) if self.patch else (height, width)
        patches = (height // patch[0]) * (width // patch[1])
        units = self.dim * self.mlp_ratio
        return nn.Sequential(
            _Tokens(channels, patch, patches, self.dim),
            *(_Block(self.dim, self.heads, units, plain=number == 0) for number in range(self.blocks)),
            _ClassToken(),
            nn.LayerNorm(self.dim),
            nn.Linear(self.dim, units),
            nn.GELU(),
            nn.Linear(units, task.outputs),
        )


class _Tokens(nn.Module):
    """A class token and the embedded patches, all with their positions: `example token dim`."""

    def __init__(self, channels: int, patch: tuple[int, int], patches: int, dim: int) -> None:
        super().__init__()
        self.patches = nn.Unfold(patch, stride=patch)
        self.embedding = nn.Linear(channels * patch[0] * patch[1], dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, dim))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embedding(self.patches(images).transpose(1, 2))
        return torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1) + self.positions


class _Attention(nn.Module):
    """Softmax attention step by step: torch's fused kernels cannot be differentiated twice."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        split = self.queries_keys_values(tokens).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        weights = (queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5).softmax(-1)
        mixed: Tensor = self.output((weights @ values).transpose(1, 2).flatten(2))
        return mixed


class _Block(nn.Module):
    """Attention and a perceptron; a `plain` one has neither norm nor shortcut around its attention."""

    def __init__(self, dim: int, heads: int, units: int, *, plain: bool) -> None:
        super().__init__()
        self.norm1 = None if plain else nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.perceptron = nn.Sequential(nn.Linear(dim, units), nn.GELU(), nn.Linear(units, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.attention(tokens) if self.norm1 is None else tokens + self.attention(self.norm1(tokens))
        seen: Tensor = tokens + self.perceptron(self.norm2(tokens))
        return seen


class _ClassToken(nn.Module):
    """The first of `example token dim` tokens: `example dim`."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]
