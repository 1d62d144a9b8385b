"""Convolutional networks for texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings, NonNegativeInt, PositiveInt, ShareBelowOne
from fedsim.base.task import Task
from fedsim.training.models import text_shape


@dataclass(frozen=True, kw_only=True)
class TextCnn(CheckedSettings):
    """TextCNN [Zhang2015] with sigmoids, which TGIAs-RO attacks (Tables X and XI).

    An embedding; parallel convolution blocks, each a convolution over neighbouring tokens, a
    sigmoid and a max pool over all positions; dropout; one linear layer. TGIAs-RO says one block of
    kernel size 3, or three with 4 and 5 as well, and counts 3 and 5 layers. It does not say whether
    they are parallel; they are in the network that it cites. Numbers of channels and embedding
    dimensions are those of the cited paper too, as is the pool over all positions, which loses the
    position of a word. TGIAs-RO's examples have their words in the right positions, which only a
    pool over few positions allows.

    Args:
        kernels: kernel size in tokens of each block's convolution, one number a block; `[3]` is the
            paper's network with one block.
        channels: output channels of each block.
        dimension: length of a token's embedding.
        pool: size and stride of the max pool, in positions; the linear layer then reads all of its
            results. 0 pools over all positions at once.
        dropout: probability of dropping an input of the linear layer, in [0, 1); 0.5 is the cited
            paper's. TGIAs-RO attacks the network in evaluation mode.
    """

    kernels: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (3, 4, 5)
    channels: PositiveInt = 100
    dimension: PositiveInt = 300
    pool: NonNegativeInt = 0
    dropout: ShareBelowOne = 0.5

    def build(self, task: Task) -> TextCnnModule:
        """Build the network for texts at least as long as the largest kernel and its pool."""
        length, vocabulary = text_shape(task, "text-cnn", smallest=max(self.kernels) + max(self.pool, 1) - 1)
        return TextCnnModule(self, length, vocabulary, task.outputs)


class TextCnnModule(nn.Module):
    """Network that `TextCnn` builds.

    Attributes:
        embedding: maps tokens to vectors; its weight is `token dimension`.
    """

    def __init__(self, settings: TextCnn, length: int, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.dimension)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(settings.dimension, settings.channels, kernel),
                nn.Sigmoid(),
                nn.MaxPool1d(settings.pool) if settings.pool else nn.AdaptiveMaxPool1d(1),
                nn.Flatten(),
            )
            for kernel in settings.kernels
        )
        self.dropout = nn.Dropout(settings.dropout)
        pooled = [(length - kernel + 1) // settings.pool if settings.pool else 1 for kernel in settings.kernels]
        self.linear = nn.Linear(settings.channels * sum(pooled), outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `example position [dimension]` tokens or embeddings to `example output`."""
        embedded = inputs if inputs.is_floating_point() else self.embedding(inputs)
        channels_first = embedded.transpose(1, 2)
        features = torch.cat([block(channels_first) for block in self.blocks], dim=1)
        logits: Tensor = self.linear(self.dropout(features))
        return logits
