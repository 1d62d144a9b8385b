"""Handwritten digits that come with scikit-learn and need no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

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
        from sklearn.datasets import load_digits

        bunch = load_digits()
        raw = torch.from_numpy(bunch.images.astype(np.uint8))[:, None]
        labels = torch.from_numpy(bunch.target.astype(np.int64))
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
