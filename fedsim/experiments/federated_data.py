"""A data set shared out among clients: who trains on what, and who is tested on what."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Dataset, Examples
from fedsim.errors import ConfigError, DataError, PluginError
from fedsim.partitions import Indices, Partition
from fedsim.randomness import numpy_generator
from fedsim.recording.header import bytes_of

_MOST = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class FederatedData:
    """A data set and its partition; a function of the data set, the settings and `seed` alone.

    Args:
        dataset: what is shared out.
        partition: how.
        clients: number of clients.
        seed: seed of the run.
        samples_per_client: keep at most this many training examples a client; None keeps all.
        test_fraction: what is held out to test on, as a share of each client's examples or of the
            clients.
        test_by: `sample`, each client tests on what it holds out; `client`, further clients, as many
            as make up the fraction of all, do not train, and the server tests on what they hold. (The
            two splits of LEAF, Caldas et al. 2018.)
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
    def clients_test(self) -> bool:
        """Whether clients hold examples out to test on."""
        return self.test_fraction > 0 and self.test_by == "sample"

    @cached_property
    def _shares(self) -> list[Indices]:
        """What each client holds, those who only test last."""
        examples = len(self.dataset.train)
        share = self.test_fraction if self.test_by == "client" else 0.0
        # Rounded first, or 19 clients and a twentieth for tests would need 1.0000000000000002 of them, which is 2.
        clients = self.clients + math.ceil(round(self.clients * share / (1 - share), 9))
        if clients > examples:
            raise ConfigError(f"federation.clients: {clients} clients for {examples} examples; lower it")
        shares = self.partition.assign(self.dataset, clients, numpy_generator(self.seed, "partition"))
        if len(shares) != clients:
            kind = type(self.partition).__name__
            raise PluginError(
                f"partition: {kind} made {len(shares)} parts for {clients} clients; this is a fault in it"
            )
        return shares

    @cached_property
    def _assigned(self) -> list[tuple[Indices, Indices]]:
        split = []
        for client, share in enumerate(self._shares[: self.clients]):
            shuffled = numpy_generator(self.seed, "split", client).permutation(share)
            held_out = math.ceil(len(shuffled) * self.test_fraction) if self.clients_test else 0
            train = shuffled[held_out:][: self.samples_per_client]
            if not len(train):
                raise ConfigError(
                    f"partition: client {client} has no example to train on; "
                    "lower federation.clients or partition.test_fraction"
                )
            split.append((np.sort(train), np.sort(shuffled[:held_out])))
        self._check_unseen(split)
        return split

    def _check_unseen(self, split: Sequence[tuple[Indices, Indices]]) -> None:
        """What is tested on is nothing that a client trains on, as it would be where clients share examples."""
        if not self.test_fraction:
            return
        tested = np.concatenate([*(held_out for _, held_out in split), *self.clients_who_test])
        seen = int(np.isin(tested, np.concatenate([train for train, _ in split])).sum())
        if seen:
            raise ConfigError(
                f"partition.test_fraction: clients share examples, so {seen} of {len(tested)} that are tested on are "
                "what others train on; set it to 0, and test on the data set's own test examples"
            )

    def indices(self, client: int) -> tuple[Indices, Indices]:
        """What `client` trains on and what it holds out: sorted indices into the training set.

        Raises:
            DataError: there is no such client.
        """
        if not 0 <= client < self.clients:
            raise DataError(f"there is no client {client}, expected one from 0 to {self.clients - 1}")
        return self._assigned[client]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all examples and labels, and of which of them each client trains on and holds out."""
        digest = hashlib.sha256()
        for examples in (self.dataset.train, self.dataset.test):
            for name in ("raw", "labels", "groups"):
                if (tensor := getattr(examples, name)) is not None:
                    digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                    digest.update(bytes_of(tensor))
        for client in range(self.clients):
            for places in self.indices(client):
                digest.update(f"{client}:{len(places)};".encode())
                digest.update(np.ascontiguousarray(places).tobytes())
        return digest.hexdigest()

    @cached_property
    def counts(self) -> list[int]:
        """N of each client, how many examples it trains on."""
        return [len(train) for train, _ in self._assigned]

    @property
    def clients_who_test(self) -> list[Indices]:
        """What each of the further clients holds who only test (`test_by = "client"`)."""
        return self._shares[self.clients :]

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        """The training inputs of `client` in the data set's value range, and their labels."""
        return self.train_parts([client])[0]

    def train_parts(self, clients: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The same of each of `clients`, gathered in one go."""
        shares = [self.indices(client)[0] for client in clients]
        inputs, labels = _take(self.dataset.train, np.concatenate(shares))
        sizes = [len(share) for share in shares]
        return list(zip(torch.split(inputs, sizes), torch.split(labels, sizes), strict=True))

    def fed(self, clients: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Training examples of each of `clients`, inputs in model units; not to be changed in place.

        The first 128 MB of them are kept: clients that train in every round need not be prepared anew. Where all of
        them do not fit, those who do are the same in each round, whatever the order.
        """
        found = {client: self._kept[client] for client in clients if client in self._kept}
        missing = [client for client in clients if client not in found]
        for client, (inputs, labels) in zip(missing, self.train_parts(missing) if missing else (), strict=True):
            own = self.to_model(inputs)
            # What was gathered is one piece of memory for all clients.
            found[client] = own.clone() if own is inputs else own, labels.clone()
            self._kept.keep(client, found[client])
        return [found[client] for client in clients]

    @cached_property
    def _kept(self) -> _Kept:
        return _Kept()

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        """What `client` holds out, in the data set's value range; may be empty."""
        return _take(self.dataset.train, self._assigned[client][1])

    def public_test(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        """What the server tests on: the data set's own test examples, or those of the clients that only test.

        With `most`, at most so many of them, drawn by the seed: the same each time.
        """
        if most is None and not (self.test_fraction and self.test_by == "client"):
            return self.dataset.test.inputs(), self.dataset.test.labels
        examples, index = self._public
        if most is not None and most < len(index):
            index = np.sort(numpy_generator(self.seed, "evaluation").choice(index, most, replace=False))
        return _take(examples, index)

    @property
    def _public(self) -> tuple[Examples, Indices]:
        """What the server tests on, by its places among examples."""
        if self.test_fraction and self.test_by == "client":
            return self.dataset.train, np.concatenate(self.clients_who_test)
        return self.dataset.test, np.arange(len(self.dataset.test))

    def held_out(self) -> tuple[Examples, Indices]:
        """What nobody trains on, by its places among examples: what the server tests on, or else what clients do."""
        examples, index = self._public
        if len(index):
            return examples, index
        return self.dataset.train, np.concatenate([held_out for _, held_out in self._assigned])

    @property
    def public_test_size(self) -> int:
        """How many examples there are to test on."""
        if self.test_fraction and self.test_by == "client":
            return sum(map(len, self.clients_who_test))
        return len(self.dataset.test)

    def to_model(self, inputs: Tensor) -> Tensor:
        """From the data set's value range to the units that the model is fed with."""
        if not self.standardise or self.dataset.vocabulary:
            return inputs
        mean, std = (moment.reshape(-1, *[1] * (inputs.ndim - 2)) for moment in self.dataset.standard)
        return (inputs - mean) / std

    def moments(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of a model input, a channel."""
        (mean, std), (shift, scale) = self.dataset.moments, self.dataset.standard
        if not self.standardise:
            return mean.tolist(), std.tolist()
        return ((mean - shift) / scale).tolist(), (std / scale).tolist()

    def value_range(self) -> tuple[list[float], list[float]]:
        """Lowest and highest value of a model input, a channel."""
        channels, *axes = self.dataset.task.input_shape
        ends = (end.expand(channels).reshape(1, channels, *[1] * len(axes)) for end in self.dataset.ends)
        low, high = (self.to_model(end).flatten().tolist() for end in ends)
        return low, high


class _Kept(dict[int, tuple[Tensor, Tensor]]):
    """Inputs and labels of some clients, of at most `_MOST` bytes."""

    held = 0

    def keep(self, client: int, examples: tuple[Tensor, Tensor]) -> None:
        """Hold these if they fit."""
        size = sum(tensor.nbytes for tensor in examples)
        if client not in self and self.held + size <= _MOST:
            self.held += size
            self[client] = examples


def _take(examples: Examples, index: Indices) -> tuple[Tensor, Tensor]:
    chosen = torch.from_numpy(index)
    return examples.inputs(chosen), examples.labels[chosen]


def check_same_data(noted: str, now: str) -> None:
    """Raise DataError where the data are others than those that a run was made with."""
    if noted != now:
        raise DataError(
            "data: the examples, or who holds which, are others than those that the run was made with, so what was "
            "recorded and found is not of these; put the files back, name the right --data-dir, or begin another run"
        )
