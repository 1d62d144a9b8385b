"""A data set partitioned among clients: the training and test examples of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, DataError, PluginError
from fedsim.base.randomness import numpy_generator
from fedsim.data import Dataset, Examples
from fedsim.data.holdout import count_held_out
from fedsim.data.partitions import Indices, Partition
from fedsim.data.partitions.shares import EvenShares
from fedsim.recording.header import tensor_bytes

GUESSED_EXAMPLES = 5000
"""How many of the first test examples guesses are made of, with which claims are compared."""
_BYTES_PER_TENSOR = 4096
"""Memory that a cached tensor takes beside its values, about: 1 kB of its own, and gaps that it leaves in the heap."""
_CACHE_BYTES = 128 * 2**20
"""Most bytes of examples that are kept in model units."""


@dataclass(frozen=True, kw_only=True)
class FederatedData:
    """Data set and its partition; a function of the data set, the settings and `seed` alone.

    Args:
        partition: rule that assigns examples to clients.
        clients: number of clients.
        seed: seed of the run.
        samples_per_client: most training examples of a client; None keeps all.
        test_fraction: share of each client's examples, or of the clients, that is held out to test
            on.
        test_by: `sample`, each client tests on its own held-out examples; `client`, further
            clients, as many as make up the fraction of all, do not train, and the server tests on
            their examples. (The two splits of LEAF [Caldas2018].)
        standardise: feed models with (x - mean) / std instead of x; tokens stay as they are.
    """

    dataset: Dataset
    partition: Partition
    clients: int
    seed: int
    samples_per_client: int | None = None
    test_fraction: float = 0.0
    test_by: Literal["sample", "client"] = "sample"
    standardise: bool = True

    @property
    def clients_hold_out(self) -> bool:
        """Return whether clients hold out examples to test on."""
        return self.test_fraction > 0 and self.test_by == "sample"

    @cached_property
    def _shares(self) -> Sequence[Indices]:
        """Assign examples to all clients; those that only test come last."""
        examples = len(self.dataset.train)
        test_share = self.test_fraction if self.test_by == "client" else 0.0
        test_clients = int(count_held_out(self.clients, test_share / (1 - test_share)))
        clients = self.clients + test_clients
        if clients > examples:
            raise ConfigError(f"federation.clients: {clients} clients for {examples} examples; lower it")
        shares = self.partition.assign(self.dataset, clients, numpy_generator(self.seed, "partition"))
        if len(shares) != clients:
            kind = type(self.partition).__name__
            raise PluginError(
                f"partition: {kind} made {len(shares)} parts for {clients} clients; this is a fault in it"
            )
        return shares if isinstance(shares, EvenShares) else [np.asarray(share) for share in shares]

    @cached_property
    def _split_by_client(self) -> dict[int, tuple[Indices, Indices]]:
        """Cache the splits that were drawn, of the clients that were asked for."""
        return {}

    def _split_share(self, client: int) -> tuple[Indices, Indices]:
        """Split a client's examples into those that it trains on and those that it holds out."""
        share, num_train = self._shares[client], self._train_counts[client]
        if num_train == len(share):  # the order of all makes no difference
            train = share.copy()
            train.sort()  # much quicker than `np.sort`, which a million clients feel
            return train, share[:0]
        num_held_out = int(self._held_out_counts[client])
        shuffled = numpy_generator(self.seed, "split", client).permutation(share)
        return np.sort(shuffled[num_held_out : num_held_out + num_train]), np.sort(shuffled[:num_held_out])

    @cached_property
    def _held_out_counts(self) -> Indices:
        """Count the examples that each client holds out."""
        return count_held_out(self._share_sizes, self.test_fraction if self.clients_hold_out else 0.0)

    @cached_property
    def _share_sizes(self) -> Indices:
        return np.array([len(self._shares[client]) for client in range(self.clients)])

    @property
    def held_out_size(self) -> int:
        """Return the number of examples that clients hold out, those of clients that only test too."""
        return int(self._held_out_counts.sum()) + sum(map(len, self.test_client_indices))

    def _check_test_examples(self) -> None:
        """Raise ConfigError where a client trains on test examples, as clients share examples."""
        if not self.test_fraction:
            return
        split = [self._split_share(client) for client in range(self.clients)]
        test_examples = np.concatenate([*(held_out for _, held_out in split), *self.test_client_indices])
        train_examples = np.concatenate([train for train, _ in split])
        common = int(np.isin(test_examples, train_examples).sum())
        if common:
            raise ConfigError(
                f"partition.test_fraction: clients share examples, so {common} of "
                f"{len(test_examples)} that are tested on are what others train on; set it to 0, "
                "and test on the data set's own test examples"
            )

    def indices(self, client: int) -> tuple[Indices, Indices]:
        """Return what `client` trains on and what it holds out, as sorted training-set indices."""
        if not 0 <= client < self.clients:
            raise DataError(f"there is no client {client}, expected one from 0 to {self.clients - 1}")
        if self.counts[client] == len(self._shares[client]):
            return self._split_share(client)
        if client not in self._split_by_client:
            self._split_by_client[client] = self._split_share(client)
        return self._split_by_client[client]

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of all examples and labels, and of each client's indices."""
        digest = hashlib.sha256()
        for examples in (self.dataset.train, self.dataset.test):
            for name in ("raw", "labels", "groups"):
                if (tensor := getattr(examples, name)) is not None:
                    digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                    digest.update(tensor_bytes(tensor))
        for client in range(self.clients):
            train, held_out = self._split_share(client)
            digest.update(b"%d:%d;%b%d:%d;" % (client, len(train), train.tobytes(), client, len(held_out)))
            digest.update(held_out.tobytes())
        return digest.hexdigest()

    @cached_property
    def counts(self) -> list[int]:
        """Return N of each client, the number of examples that it trains on."""
        self._check_test_examples()
        return self._train_counts

    @cached_property
    def _train_counts(self) -> list[int]:
        counts = self._share_sizes - self._held_out_counts
        if self.samples_per_client is not None:
            counts = np.minimum(counts, self.samples_per_client)
        if counts.min() <= 0:
            remedy = "lower federation.clients"
            if self.clients_hold_out:
                remedy += " or partition.test_fraction"
            if getattr(self.partition, "min_examples", 1) == 0:
                remedy = f"set partition.min_examples to 1 or more, or {remedy}"
            raise ConfigError(f"partition: client {int(np.argmax(counts <= 0))} has no example to train on; {remedy}")
        counts_by_client: list[int] = counts.tolist()
        return counts_by_client

    @cached_property
    def test_client_indices(self) -> Sequence[Indices]:
        """Return the examples of each client that only tests (`test_by = "client"`)."""
        return self._shares[self.clients :]

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the training inputs of `client`, in the data set's value range, and labels."""
        return self.train_by_client([client])[0]

    def train_by_client(self, clients: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the same for each of `clients`, gathered at once."""
        shares = [self.indices(client)[0] for client in clients]
        inputs, labels = _take_examples(self.dataset.train, np.concatenate(shares))
        sizes = [len(share) for share in shares]
        return list(zip(torch.split(inputs, sizes), torch.split(labels, sizes), strict=True))

    def model_examples(self, clients: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the training examples of each of `clients`, inputs in model units.

        They must not be changed in place: those of clients that are asked for again are cached, up to
        128 MB, so that clients that train in every round are prepared twice. Where not all clients
        fit, the cached ones are the same in each round, whatever the order.
        """
        examples = {client: self._cache[client] for client in clients if client in self._cache}
        missing = [client for client in clients if client not in examples]
        gathered = self.train_by_client(missing) if missing else []
        for client, (inputs, labels) in zip(missing, gathered, strict=True):
            model_inputs = self.to_model(inputs)
            # Gathered tensors are views into the memory of all clients.
            model_inputs = model_inputs.clone() if model_inputs is inputs else model_inputs
            examples[client] = model_inputs, labels.clone()
            if self._request_marks[client]:
                self._cache.add(client, examples[client])
            self._request_marks[client] = 1
        return [examples[client] for client in clients]

    @cached_property
    def _cache(self) -> _ExampleCache:
        return _ExampleCache()

    @cached_property
    def _request_marks(self) -> bytearray:
        """Mark of each client whose examples were asked for: 1, else 0.

        Many clients who train once would fill the cache for nothing, in pieces that leave the memory between them too
        small for what others train in: it took 260 MB more than without.
        """
        return bytearray(self.clients)

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the held-out examples of `client`, in the data set's value range; may be empty."""
        return _take_examples(self.dataset.train, self.indices(client)[1])

    def public_test(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the server's test examples: the data set's, or those of clients that only test.

        With `most`, at most so many of them, drawn by the seed: the same each time.
        """
        if most is None and not (self.test_fraction and self.test_by == "client"):
            return self.dataset.test.inputs(), self.dataset.test.labels
        examples, index = self._server_test
        if most is not None and most < len(index):
            index = np.sort(numpy_generator(self.seed, "evaluation").choice(index, most, replace=False))
        return _take_examples(examples, index)

    @property
    def _server_test(self) -> tuple[Examples, Indices]:
        """Return the server's test examples as indices into examples."""
        if self.test_fraction and self.test_by == "client":
            return self.dataset.train, np.concatenate(self.test_client_indices)
        return self.dataset.test, np.arange(len(self.dataset.test))

    def untrained_examples(self) -> tuple[Examples, Indices]:
        """Return the examples that no client trains on, as indices into examples.

        They are the server's test examples or, without any, those that clients hold out.
        """
        examples, index = self._server_test
        if len(index):
            return examples, index
        return self.dataset.train, np.concatenate([self.indices(client)[1] for client in range(self.clients)])

    def auxiliary_examples(self) -> tuple[Examples, Indices]:
        """Return the examples that auxiliary records are drawn from, as indices into examples.

        Nobody trains on them, and guesses are not made of them where there are others: they are the
        training examples that no client holds or, where these are fewer, those of
        `untrained_examples` without the first `GUESSED_EXAMPLES` of the data set's test examples.
        """
        held = list(self.test_client_indices)
        for client in range(self.clients):
            held += self._split_share(client)
        spare = np.setdiff1d(np.arange(len(self.dataset.train)), np.concatenate(held))
        examples, index = self.untrained_examples()
        unguessed = index[index >= GUESSED_EXAMPLES] if examples is self.dataset.test else index
        if len(spare) >= max(1, len(unguessed)):
            return self.dataset.train, spare
        return examples, unguessed if len(unguessed) else index

    @property
    def public_test_size(self) -> int:
        """Return the number of the server's test examples."""
        if self.test_fraction and self.test_by == "client":
            return sum(map(len, self.test_client_indices))
        return len(self.dataset.test)

    def to_model(self, inputs: Tensor) -> Tensor:
        """Convert inputs from the data set's value range to model units."""
        if not self.standardise or self.dataset.vocabulary:
            return inputs
        mean, std = (moment.reshape(-1, *[1] * (inputs.ndim - 2)) for moment in self.dataset.standardisation)
        return (inputs - mean) / std

    def moments(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of model inputs, by channel."""
        (mean, std), (shift, scale) = self.dataset.moments, self.dataset.standardisation
        if not self.standardise:
            return mean.tolist(), std.tolist()
        return ((mean - shift) / scale).tolist(), (std / scale).tolist()

    def value_range(self) -> tuple[list[float], list[float]]:
        """Return the lowest and highest value of model inputs, by channel."""
        channels, *axes = self.dataset.task.input_shape
        ends = (end.flatten().expand(channels).reshape(1, -1, *[1] * len(axes)) for end in self.dataset.input_bounds)
        low, high = (self.to_model(end).flatten().tolist() for end in ends)
        return low, high


class _ExampleCache(dict[int, tuple[Tensor, Tensor]]):
    """Inputs and labels of some clients, of at most `_CACHE_BYTES` bytes."""

    size = 0

    def add(self, client: int, examples: tuple[Tensor, Tensor]) -> None:
        """Add these examples if they fit."""
        size = sum(tensor.nbytes + _BYTES_PER_TENSOR for tensor in examples)
        if client not in self and self.size + size <= _CACHE_BYTES:
            self.size += size
            self[client] = examples


def _take_examples(examples: Examples, index: Indices) -> tuple[Tensor, Tensor]:
    indices = torch.from_numpy(index)
    return examples.inputs(indices), examples.labels[indices]


def check_same_data(noted: str, now: str) -> None:
    """Raise DataError where two hashes show other data than those that a run was made with."""
    if noted != now:
        raise DataError(
            "data: the examples, or who holds which, are others than those that the run was made "
            "with, so what was recorded and found is not of these; put the files back, name the "
            "right --data-dir, or begin another run"
        )
