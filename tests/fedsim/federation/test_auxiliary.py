"""Auxiliary records are a part of their own: nobody trains on them, and no floor is made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.data import Dataset
from fedsim.data.partitions.shares import Iid
from fedsim.federation import federated_data
from fedsim.federation.auxiliary import draw_auxiliary
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.overlap import exclude_training_records


def shared(digits: Dataset, **settings: Any) -> FederatedData:
    return FederatedData(**{"dataset": digits, "partition": Iid(), "clients": 5, "seed": 3, **settings})


def test_training_examples_that_no_client_holds_come_first(digits: Dataset) -> None:
    data = shared(digits, samples_per_client=8)
    examples, chosen = draw_auxiliary(data, 10**6, "auxiliary")
    assert examples is digits.train
    held = np.concatenate([data.indices(client)[0] for client in range(5)])
    assert not np.isin(chosen, held).any()
    assert len(chosen) > len(digits.train) - 5 * 8 - 20  # but for equal digits


def test_where_all_spare_examples_equal_a_clients_test_examples_are_drawn(digits: Dataset) -> None:
    raw, labels, count = digits.train.raw[:40], digits.train.labels[:40], 1000  # as many copies as spares
    copies = dataclasses.replace(digits.train, raw=raw.repeat(count // 40, 1, 1, 1), labels=labels.repeat(count // 40))
    data = shared(dataclasses.replace(digits, train=copies), samples_per_client=199)
    assert data.auxiliary_examples()[0] is copies
    examples, chosen = draw_auxiliary(data, 10**6, "auxiliary")
    assert examples is digits.test
    assert len(chosen) > 300


def test_a_clients_image_under_another_label_is_not_drawn(digits: Dataset) -> None:
    """Labels are noisy: the same image may be a 3 in one part and an 8 in the other, and gives the client's away."""
    relabelled = dataclasses.replace(digits.train, labels=(digits.train.labels + 1) % 10)
    data = shared(dataclasses.replace(digits, test=relabelled))
    examples, indices = data.untrained_examples()
    held = np.concatenate([data.indices(client)[0] for client in range(5)])
    assert set(exclude_training_records(data, examples, indices)).isdisjoint(held.tolist())


def test_what_clients_hold_out_is_not_drawn_as_spare(digits: Dataset) -> None:
    data = shared(digits, samples_per_client=200, test_fraction=0.1)
    _, spare = data.auxiliary_examples()
    held_out = np.concatenate([data.indices(client)[1] for client in range(5)])
    assert len(held_out)
    assert not np.isin(spare, held_out).any()


def test_test_examples_of_which_guesses_are_made_are_left_out(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated_data, "GUESSED_EXAMPLES", 300)
    examples, chosen = draw_auxiliary(shared(digits), 10**6, "auxiliary")
    assert examples is digits.test
    assert len(chosen)
    assert int(chosen.min()) >= 300


def test_where_guesses_are_made_of_all_test_examples_they_are_shared(digits: Dataset) -> None:
    examples, chosen = draw_auxiliary(shared(digits), 10**6, "auxiliary")
    assert examples is digits.test
    assert len(chosen) > 300


def test_a_record_that_a_client_trains_on_is_refused_by_its_content(digits: Dataset) -> None:
    """Though it stands at another index, where nobody trains on it."""
    raw, labels = digits.train.raw, digits.train.labels
    copies = dataclasses.replace(digits.train, raw=torch.cat([raw, raw]), labels=torch.cat([labels, labels]))
    twice = dataclasses.replace(digits, train=copies)
    data = shared(twice, samples_per_client=8)
    _, chosen = draw_auxiliary(data, 10**6, "auxiliary")
    trained = torch.cat([data.train(client)[0] for client in range(5)]).flatten(1)
    assert torch.cdist(copies.inputs(chosen).flatten(1), trained).min() > 0
