"""Recurrent networks for texts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.task import Task
from fedsim.training.models import text_shape


@dataclass(frozen=True, kw_only=True)
class Lstm(CheckedSettings):
    """Stacked LSTM of LEAF [Caldas2018] for the next character of Shakespeare.

    An embedding, LSTM layers, one linear layer on the last state.

    Args:
        dimension: length of a token's embedding.          [LEAF: 8]
        hidden: units of each LSTM layer.                  [LEAF: 256]
        layers: number of LSTM layers.                     [LEAF: 2]
    """

    dimension: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: PositiveInt = 2

    def build(self, task: Task) -> LstmModule:
        """Build the network for texts of any length."""
        _, vocabulary = text_shape(task, "lstm", smallest=1)
        return LstmModule(self, vocabulary, task.outputs)


class LstmModule(nn.Module):
    """Network that `Lstm` builds.

    Attributes:
        embedding: maps tokens to vectors; its weight is `token dimension`.
    """

    def __init__(self, settings: Lstm, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.dimension)
        self.recurrent = nn.LSTM(settings.dimension, settings.hidden, settings.layers, batch_first=True)
        self.linear = nn.Linear(settings.hidden, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `example position [dimension]` tokens or embeddings to `example output`."""
        embedded = inputs if inputs.is_floating_point() else self.embedding(inputs)
        states, _ = self.recurrent(embedded)
        outputs: Tensor = self.linear(states[:, -1])
        return outputs
