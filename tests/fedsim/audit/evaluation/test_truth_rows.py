"""Ids of rows in truth files are those that messages name: integers, and nothing that could be taken for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.audit.evaluation.truth import Truth, write_truth
from fedsim.base.errors import DataError


def write(folder: Path, ids: Any) -> Path:
    data = torch.rand(3, 4), torch.zeros(3, dtype=torch.long)
    return Path(write_truth(folder, lambda client: data, [0], rows=lambda client: ids)["0"])


@pytest.mark.parametrize(
    "ids",
    [["a", "b", "c"], [1.5, 2.5, 3.5], [True, False, True], [1 << 70, 1, 2], np.array([1 << 63, 1, 2], np.uint64)],
)
def test_ids_that_are_no_integers_are_refused(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="client 0: ids of rows are not integers of 64 bits"):
        write(tmp_path, ids)


def test_integers_of_any_kind_are_ids(tmp_path: Path) -> None:
    for ids in torch.tensor([7, 3, 9], dtype=torch.int32), np.array([7, 3, 9], np.uint64):
        rows = Truth.load(write(tmp_path, ids)).rows
        assert rows is not None
        assert rows.tolist() == [7, 3, 9]
