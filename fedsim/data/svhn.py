"""Street View House Numbers, from Matlab files."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedsim.base.errors import DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.files import describe_error, download_remedy, find_file, require_data_folder, verify_checksum

_SUMS = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
"""MD5 sums of the official files, as in torchvision 0.29."""


@dataclass(frozen=True, kw_only=True)
class Svhn:
    """99 289 house numbers cut into digits, 32 x 32, colour: 73 257 to train, 26 032 to test.

    References:
        [Netzer2011].
    """

    paper: ClassVar[Paper] = cite("Netzer2011")

    def load(self, folder: Path | None) -> Dataset:
        """Read torchvision's two files, in the data folder or in `SVHN` within it."""
        folder = require_data_folder(folder, "svhn")
        remedy = download_remedy("svhn", folder)
        train = find_file(folder, ["SVHN/train_32x32.mat", "train_32x32.mat"], remedy)
        test = find_file(folder, ["SVHN/test_32x32.mat", "test_32x32.mat"], remedy)

        def parse() -> Dataset:
            return Dataset(
                name="svhn",
                modality="image",
                train=_read_examples(train, folder),
                test=_read_examples(test, folder),
                num_classes=10,
                source="Y. Netzer et al.: Reading Digits in Natural Images with Unsupervised Feature Learning (2011)",
                licence="for non-commercial use",
                class_names=tuple(string.digits),
            )

        return load_cached(self, [train, test], parse)


def _read_examples(path: Path, folder: Path) -> Examples:
    from scipy.io import loadmat

    verify_checksum(path, folder, _SUMS[path.name])
    try:
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].ravel()
    except Exception as error:  # a damaged file makes SciPy raise almost anything
        raise DataError(f"{path}: is damaged ({describe_error(error)}); get it again") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise DataError(
            f"{path}: 'X' holds {images.dtype} of shape {images.shape}, expected bytes of shape "
            "(32, 32, 3, images); get the file again"
        )
    if labels.dtype.kind not in "ui":
        raise DataError(f"{path}: 'y' holds {labels.dtype}, expected integers; get the file again")
    if len(labels) != images.shape[3]:
        raise DataError(f"{path}: holds {images.shape[3]} images but {len(labels)} labels; get the file again")
    classes = torch.from_numpy(labels.astype(np.int64))
    classes[classes == 10] = 0  # the files count from 1, as Matlab does: 10 is the digit 0
    raw = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return Examples(raw=raw, labels=classes, scale=1 / 255)
