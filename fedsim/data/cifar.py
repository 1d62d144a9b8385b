"""CIFAR-10 and CIFAR-100, from the pickles that their author distributes.

A pickle can run any program. These are read by an unpickler that accepts arrays of bytes and
nothing else.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.files import (
    SUMS_FILE,
    describe_error,
    download_remedy,
    find_file,
    has_listed_sum,
    require_data_folder,
    verify_checksum,
)

log = logging.getLogger(__name__)

_SUMS_10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
_SUMS_100 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
"""MD5 sums of the official files, as in torchvision 0.29."""

_SOURCE = "A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images (2009)"
_LICENCE = "not stated; the author asks that the report be cited"


@dataclass(frozen=True, kw_only=True)
class Cifar10:
    """60 000 photographs in 10 classes, 32 x 32, colour.

    All files have to be present and official. A part of the batches is accepted only where the data
    folder's SHA256SUMS lists exactly those files, so that nobody works on a part unknowingly; the
    log then says how many examples there are.

    References:
        [Krizhevsky2009].
    """

    paper: ClassVar[Paper] = cite("Krizhevsky2009")

    def load(self, folder: Path | None) -> Dataset:
        """Read the files in torchvision's layout, `cifar-10-batches-py`."""
        folder = require_data_folder(folder, "cifar10")
        home, remedy = folder / "cifar-10-batches-py", download_remedy("cifar10", folder)
        batches = _find_batches(home, folder, remedy)
        test, meta = (find_file(home, [name], remedy) for name in ("test_batch", "batches.meta"))

        def parse() -> Dataset:
            return Dataset(
                name="cifar10",
                modality="image",
                train=_read_examples(batches, folder, _SUMS_10, "labels"),
                test=_read_examples([test], folder, _SUMS_10, "labels"),
                num_classes=10,
                source=_SOURCE,
                licence=_LICENCE,
                class_names=_read_names(meta, folder, _SUMS_10, "label_names"),
            )

        return _log_if_partial(load_cached(self, [*batches, test, meta], parse))


@dataclass(frozen=True, kw_only=True)
class Cifar100:
    """60 000 photographs in 100 classes, 32 x 32, colour.

    The files have to be official, or listed in the data folder's SHA256SUMS; the log says if they
    hold only a part.

    Args:
        coarse: use the 20 superclasses as classes.

    References:
        [Krizhevsky2009].
    """

    paper: ClassVar[Paper] = cite("Krizhevsky2009")

    coarse: bool = False

    def load(self, folder: Path | None) -> Dataset:
        """Read the files in torchvision's layout, `cifar-100-python`."""
        folder = require_data_folder(folder, "cifar100")
        remedy = download_remedy("cifar100", folder)
        train, test, meta = (
            find_file(folder / "cifar-100-python", [name], remedy) for name in ("train", "test", "meta")
        )
        kind = "coarse" if self.coarse else "fine"

        def parse() -> Dataset:
            return Dataset(
                name="cifar100",
                modality="image",
                train=_read_examples([train], folder, _SUMS_100, f"{kind}_labels"),
                test=_read_examples([test], folder, _SUMS_100, f"{kind}_labels"),
                num_classes=20 if self.coarse else 100,
                source=_SOURCE,
                licence=_LICENCE,
                class_names=_read_names(meta, folder, _SUMS_100, f"{kind}_label_names"),
            )

        return _log_if_partial(load_cached(self, [train, test, meta], parse))


def _find_batches(home: Path, folder: Path, remedy: str) -> list[Path]:
    """Return the training files: all five, or those that exist if SUMS_FILE lists these."""
    paths = [home / f"data_batch_{number}" for number in range(1, 6)]
    existing = [path for path in paths if path.is_file()]
    is_complete = len(existing) == len(paths)
    if not (is_complete or existing == [path for path in paths if has_listed_sum(path, folder)]) or not existing:
        missing = next(path for path in paths if path not in existing)
        remedy += f", or to work with a part, list exactly the files that are there in {folder / SUMS_FILE}"
        find_file(home, [missing.name], remedy)
    return existing


def _log_if_partial(dataset: Dataset) -> Dataset:
    train, test = len(dataset.train), len(dataset.test)
    if (train, test) != (50_000, 10_000):
        log.info("%s: %d of 50000 training and %d of 10000 test examples are there", dataset.name, train, test)
    return dataset


def _read_names(path: Path, folder: Path, sums: Mapping[str, str], key: str) -> tuple[str, ...]:
    names = _unpickle(path, folder, sums, [key])[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: '{key}' is not a list of names; get the file again")
    return tuple(names)


def _read_examples(paths: Sequence[Path], folder: Path, sums: Mapping[str, str], key: str) -> Examples:
    parts = [_read_batch(path, folder, sums, key) for path in paths]
    raw, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Examples(raw=raw, labels=labels, scale=1 / 255)


def _read_batch(path: Path, folder: Path, sums: Mapping[str, str], key: str) -> tuple[Tensor, Tensor]:
    """Return images `example channel height width` (uint8) and labels `example` (int64)."""
    batch = _unpickle(path, folder, sums, ["data", key])
    data, labels = batch["data"], batch[key]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072):
        raise DataError(f"{path}: 'data' is not an array of rows of 3072 bytes; get the file again")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise DataError(f"{path}: '{key}' is not a list of classes; get the file again")
    if len(labels) != len(data):
        raise DataError(f"{path}: holds {len(data)} images but {len(labels)} labels; get the file again")
    return torch.from_numpy(data.reshape(-1, 3, 32, 32)), torch.tensor(labels, dtype=torch.int64)


def _unpickle(path: Path, folder: Path, sums: Mapping[str, str], keys: Sequence[str]) -> dict[str, Any]:
    verify_checksum(path, folder, sums[path.name])
    try:
        with path.open("rb") as file:
            content = _BytesUnpickler(file, encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything, says Python's manual
        raise DataError(f"{path}: is damaged ({describe_error(error)}); get it again") from error
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise DataError(f"{path}: is not a dictionary with {' and '.join(map(repr, keys))}; get the file again")
    return content


class _BytesUnpickler(pickle.Unpickler):
    """Unpickler of plain values and arrays of bytes; it refuses all else that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if full_name not in _ALLOWED_GLOBALS:
            raise DataError(
                f"asks for {module}.{name}, which no CIFAR file needs; it is damaged or made to do harm, "
                "get the official file"
            )
        return _ALLOWED_GLOBALS[full_name]


_ARRAY_CLASS = object()
"""Stands for the class of arrays, so that a pickle can name it but not call it."""


def _make_empty_array(cls: object, _shape: object, _kind: object) -> np.ndarray[Any, Any]:
    """Return the array with which NumPy's pickles start; the shape and the bytes follow."""
    if cls is not _ARRAY_CLASS:
        raise ValueError("expected an array")
    return np.empty(0, np.uint8)


def _make_bytes_dtype(name: object, *_: object) -> np.dtype[np.uint8]:
    if name not in ("u1", "|u1"):
        raise ValueError(f"expected an array of bytes, got one of {name!r}")
    return np.dtype(np.uint8)


def _encode_latin1(text: object, encoding: object) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise ValueError(f"expected text in latin1, got {encoding!r}")
    return text.encode("latin1")


_ALLOWED_GLOBALS: Mapping[str, Any] = {
    "numpy.core.multiarray._reconstruct": _make_empty_array,
    "numpy.ndarray": _ARRAY_CLASS,
    "numpy.dtype": _make_bytes_dtype,
    "_codecs.encode": _encode_latin1,
}
