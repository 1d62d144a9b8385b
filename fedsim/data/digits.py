"""Handwritten digits that come with scikit-learn and need no download."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples


@dataclass(frozen=True, kw_only=True)
class Digits:
    """1797 real handwritten digits, 8 x 8, grey, white on black; comes with scikit-learn.

    References:
        [Alpaydin1998].
    """

    paper: ClassVar[Paper] = cite("Alpaydin1998")

    def load(self, folder: Path | None) -> Dataset:
        """Load the digits from scikit-learn; every fifth is a test example."""
        rows = _read_rows()
        raw = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8))
        labels = torch.from_numpy(rows[:, -1].astype(np.int64))
        held_out = torch.arange(len(labels)) % 5 == 4
        return Dataset(
            name="digits",
            modality="image",
            train=Examples(raw=raw[~held_out], labels=labels[~held_out], scale=1 / 16),
            test=Examples(raw=raw[held_out], labels=labels[held_out], scale=1 / 16),
            num_classes=10,
            source="UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998), test part, via scikit-learn",
            licence="CC BY 4.0 (UCI)",
        )


@cache
def _read_rows() -> NDArray[np.uint8]:
    """Read a row of 64 pixels and the digit for each image; importing scikit-learn would take seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, dtype=np.uint8, delimiter=",")
