"""A data set shared out among clients: who trains on what, and who is tested on what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Dataset, Examples
from fedsim.errors import ConfigError
from fedsim.partition import Indices, Partition
from fedsim.randomness import numpy_generator


@dataclass(frozen=True, kw_only=True)
class FederatedData:
    """A data set and its partition; a function of the data set, the settings and `seed` alone.

    Args:
        dataset: what is shared out.
        partition: how.
        clients: number of clients.
        seed: seed of the run.
        samples_per_client: keep at most this many training examples a client; None keeps all.
        test_fraction: share of each client's examples that she holds out to test on.
        standardise: feed models with (x - mean) / std instead of x in [0, 1].
    """

    dataset: Dataset
    partition: Partition
    clients: int
    seed: int
    samples_per_client: int | None = None
    test_fraction: float = 0.0
    standardise: bool = True

    @cached_property
    def _assigned(self) -> list[tuple[Indices, Indices]]:
        labels = self.dataset.train.labels.numpy()
        if self.clients > len(labels):
            raise ConfigError(f"federation.clients: {self.clients} clients for {len(labels)} examples; lower it")
        shares = self.partition.assign(labels, self.clients, numpy_generator(self.seed, "partition"))
        split = []
        for client, share in enumerate(shares):
            shuffled = numpy_generator(self.seed, "split", client).permutation(share)
            held_out = math.ceil(len(shuffled) * self.test_fraction)
            train = shuffled[held_out:][: self.samples_per_client]
            if not len(train):
                raise ConfigError(
                    f"partition: client {client} has no example to train on; "
                    "lower federation.clients or partition.test_fraction"
                )
            split.append((np.sort(train), np.sort(shuffled[:held_out])))
        return split

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        """The training inputs of `client` in [0, 1], and their labels."""
        return self.train_parts([client])[0]

    def train_parts(self, clients: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The same of each of `clients`, gathered in one go."""
        shares = [self._assigned[client][0] for client in clients]
        inputs, labels = _take(self.dataset.train, np.concatenate(shares))
        sizes = [len(share) for share in shares]
        return list(zip(torch.split(inputs, sizes), torch.split(labels, sizes), strict=True))

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        """What `client` holds out, in [0, 1]; may be empty."""
        return _take(self.dataset.train, self._assigned[client][1])

    def to_model(self, inputs: Tensor) -> Tensor:
        """From [0, 1] to the units that the model is fed with."""
        if not self.standardise:
            return inputs
        mean, std = (moment.reshape(-1, *[1] * (inputs.ndim - 2)) for moment in self.dataset.moments)
        return (inputs - mean) / std

    def value_range(self) -> tuple[list[float], list[float]]:
        """Lowest and highest value of a model input, a channel."""
        channels = self.dataset.input_shape[0]
        ends = (torch.full((1, channels, 1, 1), end) for end in (0.0, 1.0))
        low, high = (self.to_model(end).flatten().tolist() for end in ends)
        return low, high


def _take(examples: Examples, index: Indices) -> tuple[Tensor, Tensor]:
    chosen = torch.from_numpy(index)
    return examples.inputs(chosen), examples.labels[chosen]
