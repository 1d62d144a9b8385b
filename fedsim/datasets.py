"""Data sets by name. A data set plug-in is a frozen dataclass with a `load` method.

Nothing is downloaded behind the user's back: files are looked for in the folder given by
`--data-dir` or `FEDSIM_DATA`, and a missing one is named together with the way to get it.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Raw inputs and labels.

    Attributes:
        raw: `example channel height width`, as stored; `raw * scale` lies in [0, 1].
        labels: `example`, class indices.
        scale: what raw values are multiplied with.
    """

    raw: Tensor
    labels: Tensor
    scale: float

    def inputs(self, index: Tensor | slice = slice(None)) -> Tensor:
        """`example channel height width`, float32 in [0, 1]."""
        return (self.raw[index] * self.scale).to(torch.float32)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A classification task.

    Attributes:
        name: registered name.
        train: examples that clients may hold.
        test: examples that no client holds; public in the sense of the threat model.
        num_classes: number of classes.
        source: where it comes from.
        licence: what its distributors say of its use.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    source: str
    licence: str

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, `channel height width`."""
        return tuple(self.train.raw.shape[1:])

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation a channel, of the training inputs in [0, 1]."""
        sample = self.train.inputs(slice(0, 20_000)).to(torch.float64)
        axes = [0, *range(2, sample.ndim)]
        return sample.mean(axes).float(), sample.std(axes).clamp_min(1e-3).float()


class DatasetPlugin(Protocol):
    """What a registered data set offers."""

    def load(self, folder: Path | None) -> Dataset:
        """Read the data; `folder` is the data folder, None where the user gave none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Digits:
    """1797 real handwritten digits, 8 x 8, grey, white on black; comes with scikit-learn."""

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`; every fifth digit is a test example."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        raw = torch.from_numpy(bunch.images.astype(np.uint8))[:, None]
        labels = torch.from_numpy(bunch.target.astype(np.int64))
        held_out = torch.arange(len(labels)) % 5 == 4
        return Dataset(
            name="digits",
            train=Examples(raw=raw[~held_out], labels=labels[~held_out], scale=1 / 16),
            test=Examples(raw=raw[held_out], labels=labels[held_out], scale=1 / 16),
            num_classes=10,
            source="UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998), test part, via scikit-learn",
            licence="CC BY 4.0 (UCI)",
        )


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """70 000 handwritten digits, 28 x 28, grey, white on black (LeCun, Cortes, Burges)."""

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`. Reads torchvision's layout `MNIST/raw`, unpacked or gzipped."""
        home = _data_folder(folder, "mnist") / "MNIST" / "raw"
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


def _data_folder(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise DataError(f"data: '{name}' needs a data folder; give --data-dir DIR or set FEDSIM_DATA")
    if not folder.is_dir():
        raise DataError(f"data: the data folder {folder} does not exist; give --data-dir DIR or set FEDSIM_DATA")
    return folder


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
