"""Properties by name, and the records that say who has them: none that a client trains on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Column, Dataset, Examples
from fedsim.data.partitions.shares import Iid
from fedsim.federation.auxiliary import auxiliary_records
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.properties import Property, property_records

CLIENTS = 3


def make_examples(count: int, start: int) -> Examples:
    """Rows `number, red, blue` of distinct numbers; every third is red, every fourth is Ann's."""
    number = torch.arange(start, start + count)
    red = number % 3 == 0
    raw = torch.stack([number / 1000, red.float(), (~red).float()], 1)
    return Examples(raw=raw, labels=number % 2, scale=1.0, groups=(number % 4 == 0).long())


@pytest.fixture
def dataset() -> Dataset:
    return Dataset(
        name="rows",
        train=make_examples(60, 0),
        test=make_examples(40, 60),
        num_classes=2,
        source="",
        licence="",
        group_names=("Bob", "Ann"),
        columns=(Column(name="number", start=0), Column(name="colour", start=1, categories=("red", "blue"))),
    )


def federated(dataset: Dataset) -> FederatedData:
    return FederatedData(dataset=dataset, partition=Iid(), clients=CLIENTS, seed=1)


@pytest.mark.parametrize(("name", "every"), [("colour=red", 3), ("group = Ann", 4)])
def test_a_property_is_a_category_or_a_group(dataset: Dataset, name: str, every: int) -> None:
    has = Property.from_name(dataset, name).values_of(dataset.train, torch.arange(60))
    assert torch.equal(has, torch.arange(60) % every == 0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("red", "expected column=category, as sex=Female, or group=name, got 'red'"),
        ("color=red", "no categories of 'color', did you mean 'colour'"),
        ("number=3", "'number' is a column of numbers, and a property is .* categories; known: colour, group$"),
        ("colour=rad", "'colour' is never 'rad', did you mean 'red'"),
        ("group=Eve", "'group' is never 'Eve'"),
    ],
)
def test_an_unknown_property_is_refused(dataset: Dataset, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Property.from_name(dataset, name)


def test_data_without_any_property_are_refused(dataset: Dataset) -> None:
    plain = dataclasses.replace(dataset, columns=(), group_names=())
    with pytest.raises(ConfigError, match="'rows' has neither columns of categories nor groups with names"):
        Property.from_name(plain, "sex=Female")


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_records_are_none_that_clients_train_on(dataset: Dataset, fraction: float) -> None:
    if fraction:  # then it is what clients hold out
        none = Examples(raw=dataset.test.raw[:0], labels=dataset.test.labels[:0], scale=1.0)
        dataset = dataclasses.replace(dataset, test=none)
    data = dataclasses.replace(federated(dataset), test_fraction=fraction)
    records = property_records(data, "colour=red", 1000)
    assert len(records.inputs) == len(records.labels) == len(records.has) == (15 if fraction else 40)
    held = torch.cat([inputs for inputs, _ in data.model_examples(range(CLIENTS))])
    assert torch.cdist(records.inputs, held).min() > 1e-4
    assert torch.equal(records.has, records.inputs[:, 1] == 1)


def test_what_is_equal_to_a_record_of_any_client_is_not_granted(dataset: Dataset) -> None:
    """Test examples 1, 2 and 5 become copies of training examples, and 7 one with another label, which is none."""
    raw, labels = dataset.test.raw.clone(), dataset.test.labels.clone()
    for place, twin in ((1, 4), (2, 30), (5, 59), (7, 11)):
        raw[place], labels[place] = dataset.train.raw[twin], dataset.train.labels[twin]
    labels[7] = 1 - labels[7]
    test = dataclasses.replace(dataset.test, raw=raw, labels=labels)
    data = federated(dataclasses.replace(dataset, test=test))
    held = torch.cat([inputs for inputs, _ in data.model_examples(range(CLIENTS))])
    for records in (property_records(data, "colour=red", 1000), auxiliary_records(data, 1000)):
        assert len(records.inputs) == 37
        assert int((torch.cdist(records.inputs, held).amin(1) < 1e-4).sum()) == 1
    assert len(auxiliary_records(data, 30).inputs) == 30  # others take their place


def test_where_all_are_equal_to_records_of_clients_there_are_none(dataset: Dataset) -> None:
    data = federated(dataclasses.replace(dataset, test=dataset.train))
    told = r"auxiliary: each of the 60 examples of 'rows' that are held out is equal to one that a client trains on"
    with pytest.raises(DataError, match=told):
        auxiliary_records(data, 20)


def test_fewer_records_are_the_first_of_more(dataset: Dataset) -> None:
    few, more = (property_records(federated(dataset), "group=Ann", count) for count in (8, 20))
    assert torch.equal(few.inputs, more.inputs[:8])
    assert torch.equal(few.has, more.has[:8])


def test_records_of_one_kind_alone_are_refused(dataset: Dataset) -> None:
    of_bob = dataclasses.replace(dataset.test, groups=torch.zeros(40, dtype=torch.long))
    for name, told in (("Ann", "none of the 40"), ("Bob", "each of the 40")):
        with pytest.raises(DataError, match=f"{told} auxiliary records has group={name}, and an attack learns from"):
            property_records(federated(dataclasses.replace(dataset, test=of_bob)), f"group={name}", 100)


def test_public_examples_of_unknown_groups_are_refused(dataset: Dataset) -> None:
    nobodys = dataclasses.replace(dataset.test, groups=None)
    with pytest.raises(DataError, match="that no client trains on are unknown; name a column"):
        property_records(federated(dataclasses.replace(dataset, test=nobodys)), "group=Ann", 100)


def test_where_clients_train_on_everything_there_are_none(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    data = federated(dataset)
    monkeypatch.setattr(
        type(data), "untrained_examples", lambda self: (self.dataset.train, np.empty(0, dtype=np.int64))
    )
    with pytest.raises(DataError, match=r"adversary\.knowledge\.property_records: clients train on all examples"):
        property_records(data, "colour=red", 20)
