"""Handwritten digits that come with scikit-learn and need no download."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.base.constraints import CheckedSettings
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples

_TRAITS = ("even", "prime", "above four", "with a loop")
_TRAITS_OF_DIGITS = ((0, 2, 4, 6, 8), (2, 3, 5, 7), (5, 6, 7, 8, 9), (0, 6, 8, 9))
"""The digits that have each trait."""
_MOMENTS = ("ink", "row of its centre", "column of its centre", "slant")


@dataclass(frozen=True, kw_only=True)
class Digits(CheckedSettings):
    """1797 real handwritten digits, 8 x 8, grey, white on black; comes with scikit-learn.

    Args:
        targets: what is learned: the `digit`, of ten; its `traits`, four labels of which it may have any: even, prime,
            above four, with a loop; or the `moments` of the image, four standardised numbers: the mean brightness, the
            row and the column of its centre, and the correlation of rows and columns.

    References:
        [Alpaydin1998].
    """

    targets: Literal["digit", "traits", "moments"] = "digit"

    paper: ClassVar[Paper] = cite("Alpaydin1998")

    def load(self, folder: Path | None) -> Dataset:
        """Load the digits from scikit-learn; every fifth is a test example."""
        rows = _read_rows()
        raw = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8))
        held_out = torch.arange(len(rows)) % 5 == 4
        labels, fields = self._make_targets(raw, torch.from_numpy(rows[:, -1].astype(np.int64)), ~held_out)
        return Dataset(
            name="digits",
            modality="image",
            train=Examples(raw=raw[~held_out], labels=labels[~held_out], scale=1 / 16),
            test=Examples(raw=raw[held_out], labels=labels[held_out], scale=1 / 16),
            source="UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998), test part, via scikit-learn",
            licence="CC BY 4.0 (UCI)",
            **fields,
        )

    def _make_targets(self, raw: Tensor, digits: Tensor, is_train: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the targets, and the fields of `Dataset` that describe them."""
        if self.targets == "digit":
            return digits, {"num_classes": 10}
        if self.targets == "traits":
            traits = torch.stack([torch.isin(digits, torch.tensor(having)) for having in _TRAITS_OF_DIGITS], 1)
            return traits.float(), {"num_classes": 0, "num_labels": len(_TRAITS), "class_names": _TRAITS}
        moments = _measure_moments(raw[:, 0].double())
        mean, deviation = moments[is_train].mean(0), moments[is_train].std(0)
        standardised = ((moments - mean) / deviation).float()
        return standardised, {"num_classes": 0, "num_targets": len(_MOMENTS), "class_names": _MOMENTS}


def _measure_moments(images: Tensor) -> Tensor:
    """Return the mean brightness, the centre's row and column, and the correlation of both, `image moment`."""
    ink = images.sum((1, 2))
    places = torch.arange(8, dtype=images.dtype)
    rows, columns = images.sum(2) / ink[:, None], images.sum(1) / ink[:, None]
    row, column = rows @ places, columns @ places
    row_variance, column_variance = rows @ places.square() - row.square(), columns @ places.square() - column.square()
    products = (images * torch.outer(places, places)).sum((1, 2)) / ink
    slant = (products - row * column) / (row_variance * column_variance).sqrt()
    return torch.stack([ink / 64, row, column, slant], 1)


@cache
def _read_rows() -> NDArray[np.uint8]:
    """Read a row of 64 pixels and the digit for each image; importing scikit-learn would take seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, dtype=np.uint8, delimiter=",")
