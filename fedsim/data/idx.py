"""Images in LeCun's idx format: MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import gzip
import math
import string
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.base.constraints import CheckedSettings
from fedsim.base.errors import DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.files import download_remedy, find_file, require_data_folder, verify_checksum
from fedsim.data.holdout import choose_evenly

_MNIST_SUMS = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
    "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
}
_FASHION_SUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""MD5 sums of the official files, as in torchvision 0.29; unpacked files have none."""

_UBYTE_IMAGES, _UBYTE_LABELS, _INT_ROWS = 0x803, 0x801, 0xC02
"""Magic numbers: the type of the elements, and the number of axes."""

_FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

_DISTINCT_LETTERS = "abdefghnqrt"
"""Lower-case letters that are classes of their own in EMNIST's `balanced` and `bymerge`."""

Split = Literal["letters", "balanced", "byclass", "bymerge", "digits", "mnist"]
_EMNIST_CLASSES: Mapping[Split, str] = {
    "letters": string.ascii_lowercase,
    "balanced": string.digits + string.ascii_uppercase + _DISTINCT_LETTERS,
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "bymerge": string.digits + string.ascii_uppercase + _DISTINCT_LETTERS,
    "digits": string.digits,
    "mnist": string.digits,
}


@dataclass(frozen=True)
class _FilePair:
    """The image file and the label file of one part of a data set."""

    images: Path
    labels: Path

    @classmethod
    def find(cls, home: Path, stem: str, remedy: str) -> _FilePair:
        """Find the files called `stem-...` in `home`, unpacked or gzipped."""
        names = (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
        return cls(*(find_file(home, [name, f"{name}.gz"], remedy) for name in names))

    def read(self, folder: Path, sums: Mapping[str, str]) -> tuple[Tensor, Tensor]:
        """Return images `example channel height width` (uint8) and labels `example` (int64)."""
        raw = torch.from_numpy(_read_idx(self.images, folder, sums, _UBYTE_IMAGES))[:, None]
        labels = torch.from_numpy(_read_idx(self.labels, folder, sums, _UBYTE_LABELS).astype(np.int64))
        if len(raw) != len(labels):
            raise DataError(
                f"{self.images}: holds {len(raw)} images, but {self.labels.name} holds {len(labels)} labels; "
                "get both again"
            )
        return raw, labels


def _list_paths(parts: Iterable[_FilePair]) -> list[Path]:
    return [path for part in parts for path in (part.images, part.labels)]


def _make_examples(raw: Tensor, labels: Tensor, groups: Tensor | None = None) -> Examples:
    return Examples(raw=raw, labels=labels, scale=1 / 255, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Mnist:
    """70 000 handwritten digits, 28 x 28, grey, white on black.

    Their natural groups are the writers, where the label files of QMNIST [Yadav2019] are in
    `QMNIST/raw`: 539 people wrote the training digits, 297 others the test digits.

    References:
        [LeCun1998].
    """

    paper: ClassVar[Paper] = cite("LeCun1998")

    def load(self, folder: Path | None) -> Dataset:
        """Read the files in torchvision's layout, `MNIST/raw`, unpacked or gzipped."""
        folder = require_data_folder(folder, "mnist")
        remedy = download_remedy("mnist", folder)
        parts = [_FilePair.find(folder / "MNIST" / "raw", stem, remedy) for stem in ("train", "t10k")]
        writer_files = [_find_writer_file(folder, part) for part in ("train", "test")]
        sources = [*_list_paths(parts), *(path for path in writer_files if path)]
        return load_cached(self, sources, lambda: _parse_mnist(folder, parts, writer_files))


def _find_writer_file(folder: Path, part: str) -> Path | None:
    plain = folder / "QMNIST" / "raw" / f"qmnist-{part}-labels-idx2-int"
    return next((path for path in (plain, plain.with_name(f"{plain.name}.gz")) if path.is_file()), None)


def _parse_mnist(folder: Path, parts: list[_FilePair], writer_files: list[Path | None]) -> Dataset:
    examples, group_of_writer = [], dict[int, int]()
    for part, path in zip(parts, writer_files, strict=True):
        raw, labels = part.read(folder, _MNIST_SUMS)
        groups = None
        if path:
            writers = _read_writers(path, folder, labels)
            for writer in sorted(set(writers) - set(group_of_writer)):
                group_of_writer[writer] = len(group_of_writer)
            groups = torch.tensor([group_of_writer[writer] for writer in writers])
        examples.append(_make_examples(raw, labels, groups))
    return Dataset(
        name="mnist",
        modality="image",
        train=examples[0],
        test=examples[1],
        num_classes=10,
        source="Y. LeCun, C. Cortes, C. Burges: The MNIST database; writers: C. Yadav, L. Bottou: QMNIST (2019)",
        licence="CC BY-SA 3.0; QMNIST's labels: BSD style",
        class_names=tuple(string.digits),
        group_names=tuple(map(str, group_of_writer)),
    )


def _read_writers(path: Path, folder: Path, labels: Tensor) -> list[int]:
    """Return NIST's id of the writer of each digit.

    The first rows of the file are MNIST's digits, in MNIST's order.
    """
    rows = _read_idx(path, folder, _MNIST_SUMS, _INT_ROWS)[: len(labels)]
    if rows.shape != (len(labels), 8) or not np.array_equal(rows[:, 0], labels.numpy()):
        raise DataError(f"{path}: its digits are not those of MNIST/raw; get QMNIST's file again, or remove it")
    ids: list[int] = rows[:, 2].tolist()
    return ids


@dataclass(frozen=True, kw_only=True)
class FashionMnist:
    """70 000 pictures of clothes in 10 classes, 28 x 28, grey, on black.

    References:
        [Xiao2017].
    """

    paper: ClassVar[Paper] = cite("Xiao2017")

    def load(self, folder: Path | None) -> Dataset:
        """Read the files in torchvision's layout, `FashionMNIST/raw`, unpacked or gzipped."""
        folder = require_data_folder(folder, "fashion-mnist")
        remedy = download_remedy("fashion-mnist", folder)
        parts = [_FilePair.find(folder / "FashionMNIST" / "raw", stem, remedy) for stem in ("train", "t10k")]

        def parse() -> Dataset:
            train, test = (_make_examples(*part.read(folder, _FASHION_SUMS)) for part in parts)
            return Dataset(
                name="fashion-mnist",
                modality="image",
                train=train,
                test=test,
                num_classes=10,
                source="H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST (2017)",
                licence="MIT",
                class_names=_FASHION,
            )

        return load_cached(self, _list_paths(parts), parse)


@dataclass(frozen=True, kw_only=True)
class Emnist(CheckedSettings):
    """Handwritten letters and digits, 28 x 28, grey, white on black, upright.

    Args:
        split: which classes. `letters`: 26, capitals and small letters in one; `digits`, `mnist`:
            10;
            `byclass`: 62; `balanced`, `bymerge`: 47, with letters merged whose two forms look
                alike.
        files: `both` reads the training and the test file. `test` reads the official test file
            only: every fifth example of a class is a test example, the others are training
                examples.

    References:
        [Cohen2017].
    """

    paper: ClassVar[Paper] = cite("Cohen2017")

    split: Split = "letters"
    files: Literal["both", "test"] = "both"

    def load(self, folder: Path | None) -> Dataset:
        """Read the files in torchvision's layout, `EMNIST/raw`, unpacked or gzipped."""
        folder = require_data_folder(folder, "emnist")
        parts = self._find_parts(folder / "EMNIST" / "raw", download_remedy("emnist", folder))
        return load_cached(self, _list_paths(parts), lambda: self._parse(folder, parts))

    def _find_parts(self, home: Path, remedy: str) -> list[_FilePair]:
        if self.files == "test":
            return [_FilePair.find(home, f"emnist-{self.split}-test", remedy)]
        if any(home.glob(f"emnist-{self.split}-test-images-idx3-ubyte*")):
            remedy = f'set data.files = "test" to make do with the official test file, or {remedy}'
        return [_FilePair.find(home, f"emnist-{self.split}-{part}", remedy) for part in ("train", "test")]

    def _parse(self, folder: Path, parts: list[_FilePair]) -> Dataset:
        stored = [part.read(folder, {}) for part in parts]
        first_class = 1 if self.split == "letters" else 0
        # The files hold each image mirrored along its diagonal.
        pairs = [(raw.mT.contiguous(), labels - first_class) for raw, labels in stored]
        if self.files == "test":
            raw, labels = pairs[0]
            held_out = choose_evenly(labels, 1 / 5)
            pairs = [(raw[~held_out], labels[~held_out]), (raw[held_out], labels[held_out])]
        train, test = (_make_examples(*pair) for pair in pairs)
        names = tuple(_EMNIST_CLASSES[self.split])
        return Dataset(
            name="emnist",
            modality="image",
            train=train,
            test=test,
            num_classes=len(names),
            source="G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST (2017), from NIST Special Database 19",
            licence="not stated; NIST's database is a work of the US government",
            class_names=names,
        )


def _read_idx(path: Path, folder: Path, sums: Mapping[str, str], magic: int) -> np.ndarray[Any, Any]:
    """Return the array in an idx file, plain or gzipped, whose magic number has to be `magic`."""
    verify_checksum(path, folder, sums.get(path.name))
    axes, kind = magic & 0xFF, ">i4" if magic == _INT_ROWS else np.uint8
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            got = int.from_bytes(file.read(4), "big")
            if got != magic:
                raise ValueError(f"expected magic number {magic}, got {got}")
            shape = np.frombuffer(file.read(4 * axes), ">u4", axes).tolist()
            size = math.prod(shape) * np.dtype(kind).itemsize
            if complaint := memory_complaint(size):
                raise ValueError(f"what it says that it holds would {complaint}")
            # A few bytes may be packed zeros without end, so no more are read than there should be.
            content = file.read(size)
            if len(content) < size or file.read(1):
                raise ValueError(
                    f"it holds {'fewer' if len(content) < size else 'more'} than the {size} bytes that it names"
                )
        return np.frombuffer(content, kind).reshape(shape).copy()
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        raise DataError(f"{path}: is damaged ({error}); download it again") from error
