"""Equal shares that are cut when they are asked for are those of a list that is made at once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from fedsim.data import Dataset
from fedsim.data.partitions import Indices
from fedsim.data.partitions.shares import EvenShares, Iid
from fedsim.federation.federated_data import FederatedData


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("examples", [0, 1, 6, 7, 20])
def test_even_shares_are_those_of_numpy_however_they_are_asked_for(examples: int, clients: int) -> None:
    indices = np.random.default_rng(0).permutation(examples)
    shares = pickle.loads(pickle.dumps(EvenShares(indices, clients)))
    expected = np.array_split(indices, clients)
    assert len(shares) == clients
    wholes = [list(shares), shares[:], list(reversed(shares))[::-1]]
    wholes.append([shares[client] for client in np.arange(clients)])
    wholes.append([shares[client - clients] for client in range(clients)])
    for whole in wholes:
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(whole, expected, strict=True))
    for part in (slice(2, -1, 2), slice(None, None, -1), slice(clients - 1, None), slice(clients, None)):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(shares[part], expected[part], strict=True))
    for client in (clients, -clients - 1):
        with pytest.raises(IndexError):
            shares[client]


@dataclass(frozen=True)
class ListedIid:
    """The same shares as a list, which partitions of other packages return."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        """See `Partition`."""
        return np.array_split(rng.permutation(len(dataset.train)), clients)


@pytest.mark.parametrize("clients", [1, 7, 1100])
@pytest.mark.parametrize("test_by", ["sample", "client"])
def test_clients_hold_the_same_of_even_shares_and_of_a_list(
    digits: Dataset, test_by: Literal["sample", "client"], clients: int
) -> None:
    def federate(partition: Iid | ListedIid, fraction: float) -> FederatedData:
        return FederatedData(
            dataset=digits,
            partition=partition,
            clients=clients,
            seed=3,
            samples_per_client=20,
            test_fraction=fraction,
            test_by=test_by,
        )

    # One example of a client cannot be held out.
    fraction = 0.0 if clients > 1000 and test_by == "sample" else 0.2
    even, listed = federate(Iid(), fraction), federate(ListedIid(), fraction)
    assert (even.sha256, even.counts, even.held_out_size) == (listed.sha256, listed.counts, listed.held_out_size)
    assert np.array_equal(even.untrained_examples()[1], listed.untrained_examples()[1])
    assert np.array_equal(even.auxiliary_examples()[1], listed.auxiliary_examples()[1])


def test_shares_of_those_who_only_test_are_cut_once(digits: Dataset) -> None:
    data = FederatedData(dataset=digits, partition=Iid(), clients=8, seed=3, test_fraction=0.2, test_by="client")
    # A table of all clients asks for them once for each.
    assert data.test_client_indices is data.test_client_indices
    assert len(data.test_client_indices) == 2
