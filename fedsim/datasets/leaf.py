"""Data as LEAF writes them: JSON files with the examples of each user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, ClassVar

from fedsim.datasets import Dataset, Examples
from fedsim.datasets.cache import cached
from fedsim.datasets.files import data_folder, verify
from fedsim.datasets.leaf_files import LETTERS, LeafFiles
from fedsim.datasets.tabular import plain_columns
from fedsim.errors import ConfigError, DataError
from fedsim.paper import Paper

_MOST_CLASSES = 100_000
"""A label beyond is rather damage than a class; LEAF's largest task, Reddit, predicts one of 10 000 words."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """Any task in LEAF's JSON format (Caldas et al. 2018) whose examples are lists of numbers or texts.

    Lists of numbers are images or rows of a table, as they are in the file; texts are characters, the tokens being
    LEAF's 80, and a label that is a character is the class of that number. Users are the natural groups, those of the
    training and of the test files alike, so both of LEAF's splits load: by sample and by user. Sentences as lists of
    words or fields (sent140, reddit) and names of image files (celeba) are not supported.

    Args:
        path: a folder that holds `data/train` and `data/test`, or `train` and `test`, with LEAF's JSON files;
            absolute, or within the data folder or its folder `leaf`.
        shape: of an example, `channel height width` of an image or the number of features; by default a square
            image where there are as many numbers as a square of at least 8 x 8 has, all in [0, 1], else a table.
        num_classes: number of classes; by default one more than the largest label.
    """

    path: str = ""
    shape: tuple[int, ...] | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and (len(self.shape) not in (1, 3) or min(self.shape) < 1):
            raise ConfigError(f"shape: expected [channels, height, width] or [features], got {list(self.shape)}")
        if self.num_classes is not None and self.num_classes < 2:
            raise ConfigError(f"num_classes: expected at least 2, got {self.num_classes}")

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`.

        Raises:
            DataError: a file is missing, or is not what LEAF writes.
        """
        if not self.path:
            raise DataError("data: 'leaf' needs a path; set data.path to the folder of a LEAF task")
        path = Path(self.path).expanduser()
        home = path if path.is_absolute() else data_folder(folder, "leaf")
        places = [path] if path.is_absolute() else [home / path, home / "leaf" / path]
        files = _files(places, "correct data.path")

        def parse() -> Dataset:
            about = _read(files, home, self.shape, self.num_classes)
            return Dataset(
                name="leaf", source=f"JSON files in {Path(self.path).name}", licence="as its owner says", **about
            )

        return cached(self, [path for part in files for path in part], parse)


@dataclass(frozen=True, kw_only=True)
class Femnist:
    """LEAF's FEMNIST: handwritten digits and letters, 62 classes, 28 x 28, grey, black on white, by writer.

    Background is 1.0 and ink 0.0, unlike in MNIST. Classes are the digits, then A to Z, then a to z.

    Args:
        folder: where in the data folder's `leaf` the task is, such as `femnist-digits` for digits alone.

    References:
        Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018.
    """

    paper: ClassVar[Paper] = Paper(
        title="LEAF: A Benchmark for Federated Settings",
        authors="Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar",
        venue="arXiv",
        year=2018,
        url="https://arxiv.org/abs/1812.01097",
    )

    folder: str = "femnist"

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`. Reads `leaf/FOLDER/data/train/*.json` and `leaf/FOLDER/data/test/*.json`."""
        home = data_folder(folder, "femnist")
        place = home / "leaf" / self.folder
        files = _files(
            [place], f"LEAF's data/femnist/preprocess.sh writes data/femnist/data; copy that to {place}/data"
        )

        def parse() -> Dataset:
            about = _read(files, home, (1, 28, 28), 62)
            about["class_names"] = tuple(digits + ascii_uppercase + ascii_lowercase)
            source = "S. Caldas et al.: LEAF, A Benchmark for Federated Settings (2018), from NIST Special Database 19"
            return Dataset(name="femnist", source=source, licence="BSD-2-Clause (LEAF's code)", **about)

        return cached(self, [path for part in files for path in part], parse)


def _files(places: Sequence[Path], remedy: str) -> tuple[list[Path], list[Path]]:
    """The JSON files to train and to test on in the first of `places` that has any."""
    homes = [place / inner for place in places for inner in ("data", ".")]
    home = next((home for home in homes if (home / "train").is_dir()), None)
    if home is None:
        raise DataError(f"{homes[0] / 'train'}: no such folder; {remedy}")
    train, test = (
        sorted(path for path in (home / part).glob("*.json") if path.is_file()) for part in ("train", "test")
    )
    for part, found in (("train", train), ("test", test)):
        if not found:
            raise DataError(f"{home / part}: holds no .json file, expected the {part} part of a LEAF task; {remedy}")
    return train, test


def _read(
    files: tuple[list[Path], list[Path]], home: Path, shape: tuple[int, ...] | None, num_classes: int | None
) -> dict[str, Any]:
    """What the files to train and to test on say of a `Dataset`."""
    reader = LeafFiles(num_classes)
    train, test = (reader.read([verify(path, home) for path in paths]) for paths in files)
    place = files[0][0].parent.parent
    about: dict[str, Any] = {"group_names": tuple(reader.users)}
    if reader.letters:
        about |= {"num_classes": len(LETTERS), "class_names": tuple(LETTERS)}
    else:
        about["num_classes"] = num_classes or int(max(train.labels.max(), test.labels.max())) + 1
        if num_classes is None and about["num_classes"] > _MOST_CLASSES:
            raise DataError(
                f"{place}: a y is {about['num_classes'] - 1}, which would make more than {_MOST_CLASSES} classes; "
                "correct the file, or set data.num_classes"
            )
        if about["num_classes"] < 2:
            raise DataError(f"{place}: each y is 0, expected at least two classes")
    if reader.texts:
        if shape is not None:
            raise ConfigError("shape: expected none for texts, whose length is that of the file; remove it")
        scale, shape = None, (reader.size,)
        about |= {"vocabulary": len(LETTERS), "tokens": tuple(LETTERS)}
    else:
        low = float(min(train.inputs.min(), test.inputs.min()))
        high = float(max(train.inputs.max(), test.inputs.max()))
        scale, shape = 1.0, shape or _guessed(reader.size, low >= 0 and high <= 1)
        if math.prod(shape) != reader.size:
            raise ConfigError(f"shape: {list(shape)} is for {math.prod(shape)} numbers, but {place} has {reader.size}")
        about["value_range"] = (0.0, 1.0) if len(shape) == 3 and low >= 0 and high <= 1 else (low, high)
        about["columns"] = plain_columns(reader.size) if len(shape) == 1 else ()
    for name, part in (("train", train), ("test", test)):
        raw = part.inputs.reshape(-1, *shape)
        about[name] = Examples(raw=raw, labels=part.labels, scale=scale, groups=part.groups)
    return about


def _guessed(size: int, grey: bool) -> tuple[int, ...]:
    side = math.isqrt(size)
    return (1, side, side) if grey and side >= 8 and side**2 == size else (size,)
