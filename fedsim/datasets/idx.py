"""Images in LeCun's idx format: MNIST and its relatives."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedsim.datasets import Dataset, Examples
from fedsim.datasets.files import data_folder
from fedsim.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """70 000 handwritten digits, 28 x 28, grey, white on black (LeCun, Cortes, Burges)."""

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`. Reads torchvision's layout `MNIST/raw`, unpacked or gzipped."""
        home = data_folder(folder, "mnist") / "MNIST" / "raw"
        parts = {}
        for part, stem in (("train", "train"), ("test", "t10k")):
            raw = torch.from_numpy(_read_idx(home, f"{stem}-images-idx3-ubyte", magic=2051))[:, None]
            labels = torch.from_numpy(_read_idx(home, f"{stem}-labels-idx1-ubyte", magic=2049).astype(np.int64))
            if len(raw) != len(labels):
                raise DataError(f"{home}: {stem} holds {len(raw)} images but {len(labels)} labels; download it again")
            parts[part] = Examples(raw=raw, labels=labels, scale=1 / 255)
        return Dataset(
            name="mnist",
            train=parts["train"],
            test=parts["test"],
            num_classes=10,
            source="Y. LeCun, C. Cortes, C. Burges: The MNIST database",
            licence="CC BY-SA 3.0",
        )


def _read_idx(folder: Path, stem: str, magic: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read one file of LeCun's idx format, plain or gzipped."""
    plain, packed = folder / stem, folder / f"{stem}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise DataError(
            f"{plain}[.gz]: no such file; on a machine with a network, "
            f"`python -c \"import torchvision; torchvision.datasets.MNIST('{folder.parent.parent}', download=True)\"` "
            "fetches it"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path is packed else path.read_bytes()
        axes = content[3]
        shape: Sequence[int] = np.frombuffer(content, ">i4", axes, offset=4).tolist()
        if int.from_bytes(content[:4], "big") != magic:
            raise ValueError(f"expected magic number {magic}, got {int.from_bytes(content[:4], 'big')}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path}: is damaged ({error}); download it again") from error
