"""Vision transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.task import Task
from fedsim.training.models import image_shape, task_mismatch
from fedsim.training.models.transformer import TransformerBlock


@dataclass(frozen=True, kw_only=True)
class Vit(CheckedSettings):
    """Vision transformer [Dosovitskiy2021], small enough to be trained from scratch.

    Patches are embedded by a linear layer. With a class token and learned positions they pass
    through blocks of attention and a perceptron, each after a layer norm and with a shortcut. The
    head is layer norm and one linear layer on the class token. Blocks are those of
    `transformer-encoder`, whose attention has second derivatives. The class token starts at zero
    and the positions at deviation 0.02, as in torchvision; there is no dropout.

    Args:
        patch: pixels of a patch's side.
        dim: length of a token's embedding.
        heads: attention heads.
        blocks: number of blocks.
        mlp_ratio: hidden units of each block's perceptron, as a multiple of `dim`.
    """

    patch: PositiveInt = 4
    dim: PositiveInt = 128
    heads: PositiveInt = 4
    blocks: PositiveInt = 4
    mlp_ratio: PositiveInt = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self)

    def build(self, task: Task) -> nn.Module:
        """Build the network for images whose height and width are multiples of `patch`."""
        tokens = _Tokens(*_patches(task, "vit", self.patch), self.dim)
        nn.init.normal_(tokens.positions, std=0.02)
        blocks = [
            TransformerBlock(self.dim, heads=self.heads, mlp_ratio=self.mlp_ratio, dropout=0.0)
            for _ in range(self.blocks)
        ]
        return _VitModule(tokens, blocks, nn.Linear(self.dim, task.outputs))


@dataclass(frozen=True, kw_only=True)
class VitApril(CheckedSettings):
    """Vision transformer of type A of APRIL [Lu2022], as SME, App. G, attacks it.

    Its first block applies attention directly to the embedded patches, without normalisation and
    shortcut, which makes APRIL's closed form possible; the other blocks normalise first. The head
    is layer norm - linear - GELU - linear on the class token. The class token and the positions
    start at zero. Sizes are those of SME's released code; SME's text names none, nor a patch size.

    Args:
        patch: pixels of a patch's side; by default the whole image is one patch, as in SME's
            released code.
        dim: length of a token's embedding.
        heads: attention heads.
        blocks: number of blocks.
        mlp_ratio: hidden units of each block's perceptron, and of the head, as a multiple of `dim`.
    """

    patch: PositiveInt | None = None
    dim: PositiveInt = 384
    heads: PositiveInt = 4
    blocks: PositiveInt = 4
    mlp_ratio: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self)

    def build(self, task: Task) -> nn.Module:
        """Build the network for images whose height and width are multiples of `patch`."""
        channels, patch, patches = _patches(task, "vit-april", self.patch)
        units = self.dim * self.mlp_ratio
        return nn.Sequential(
            _Tokens(channels, patch, patches, self.dim),
            *(_AprilBlock(self.dim, self.heads, units, plain=number == 0) for number in range(self.blocks)),
            _SelectClassToken(),
            nn.LayerNorm(self.dim),
            nn.Linear(self.dim, units),
            nn.GELU(),
            nn.Linear(units, task.outputs),
        )


def _check_heads(sizes: Vit | VitApril) -> None:
    if sizes.dim % sizes.heads:
        raise ConfigError(f"dim: expected a multiple of heads ({sizes.heads}), got {sizes.dim}")


def _patches(task: Task, model: str, side: int | None) -> tuple[int, tuple[int, int], int]:
    """Return the channels of the images, height and width of a patch, and the number of patches.

    Without a `side`, the whole image is one patch.
    """
    channels, height, width = image_shape(task, model, smallest=side or 1)
    if side and (height % side or width % side):
        raise task_mismatch(task, model, f"images whose sides are multiples of {side}", "another patch")
    patch = (side, side) if side else (height, width)
    return channels, patch, (height // patch[0]) * (width // patch[1])


class _VitModule(nn.Module):
    """Network of tokens, blocks, and the head on the class token."""

    def __init__(self, tokens: _Tokens, blocks: Sequence[TransformerBlock], linear: nn.Linear) -> None:
        super().__init__()
        self.tokens = tokens
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(linear.in_features)
        self.linear = linear

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.tokens(images)
        # Each token attends to all.
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device)
        for block in self.blocks:
            tokens = block(tokens, mask)
        outputs: Tensor = self.linear(self.norm(tokens[:, 0]))
        return outputs


class _Tokens(nn.Module):
    """Class token and embedded patches, all with their positions: `example token dim`."""

    def __init__(self, channels: int, patch: tuple[int, int], patches: int, dim: int) -> None:
        super().__init__()
        self.patches = nn.Unfold(patch, stride=patch)
        self.embedding = nn.Linear(channels * patch[0] * patch[1], dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, dim))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embedding(self.patches(images).transpose(1, 2))
        return torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1) + self.positions


class _PatchAttention(nn.Module):
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


class _AprilBlock(nn.Module):
    """Attention and a perceptron; a `plain` block has no norm or shortcut around its attention."""

    def __init__(self, dim: int, heads: int, units: int, *, plain: bool) -> None:
        super().__init__()
        self.norm1 = None if plain else nn.LayerNorm(dim)
        self.attention = _PatchAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.perceptron = nn.Sequential(nn.Linear(dim, units), nn.GELU(), nn.Linear(units, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.attention(tokens) if self.norm1 is None else tokens + self.attention(self.norm1(tokens))
        outputs: Tensor = tokens + self.perceptron(self.norm2(tokens))
        return outputs


class _SelectClassToken(nn.Module):
    """Layer that selects the first of `example token dim` tokens, `example dim`."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]
