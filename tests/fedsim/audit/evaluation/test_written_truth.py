"""Truth files are written from what loaders of Flower apps return, or the error says what to return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedsim.audit.evaluation.truth import Truth, write_truth
from fedsim.base.errors import DataError


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.rand(4, 3), torch.arange(4)), batch_size=2)


def test_loaders_to_train_and_to_test_on_are_told_apart(loader: DataLoader, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"client 0: its data are 2 DataLoaders; return the one that it trains on"):
        write_truth(tmp_path, lambda client: (loader, loader), [0])
    path = write_truth(tmp_path, lambda client: loader, [0])["0"]
    assert Truth.load(Path(path)).labels.tolist() == [0, 1, 2, 3]


def test_batches_that_are_dicts_are_named_with_their_keys(loader: DataLoader, tmp_path: Path) -> None:
    batches = [{"img": inputs, "label": labels} for inputs, labels in loader]
    with pytest.raises(DataError, match="client 0: its batches are dicts of 'img', 'label'; yield pairs instead"):
        write_truth(tmp_path, lambda client: batches, [0])
