"""Data in LEAF's format: JSON files with the examples of each user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError, DataError
from fedsim.base.papers import Paper, cite
from fedsim.base.task import infer_modality
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.files import correct_path, require_data_folder, require_folder_of, verify_checksum
from fedsim.data.leaf_files import LETTERS, LeafFiles
from fedsim.data.tabular import numeric_columns

_MAX_CLASSES = 100_000
"""A larger label means a damaged file; LEAF's largest task, Reddit, has 10 000 words."""


@dataclass(frozen=True, kw_only=True)
class Leaf(CheckedSettings):
    """Any task in LEAF's JSON format [Caldas2018] with lists of numbers, or with texts.

    Lists of numbers are images or rows of a table, as they are in the file. Texts are sequences of
    characters, with LEAF's 80 characters as tokens; a label that is a character is the class of
    that token. Users of the training and of the test files are the natural groups, so both of
    LEAF's splits load: by sample and by user. Sentences as lists of words or fields (sent140,
    reddit) and names of image files (celeba) are not supported.

    Args:
        path: a folder that holds `data/train` and `data/test`, or `train` and `test`, with LEAF's
            JSON files; absolute, or within the data folder or its folder `leaf`.
        shape: shape of an example: `channel height width` of an image, or the number of features.
            By default it is a square image where the numbers fill a square of at least 8 x 8 and
            are all in [0, 1], and else a row of a table.
        num_classes: number of classes; by default one more than the largest label.
    """

    path: str = ""
    shape: tuple[PositiveInt, ...] | None = None
    num_classes: Annotated[int, Ge(2)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is not None and len(self.shape) not in (1, 3):
            raise ConfigError(f"shape: expected [channels, height, width] or [features], got {list(self.shape)}")

    def load(self, folder: Path | None) -> Dataset:
        """Read the JSON files below `path`."""
        if not self.path:
            raise DataError("data: 'leaf' needs a path; set data.path to the folder of a LEAF task")
        path = Path(self.path).expanduser()
        home = path if path.is_absolute() else require_folder_of(path, folder, "leaf")
        candidates = [path] if path.is_absolute() else [home / path, home / "leaf" / path]
        files = _find_files(candidates, correct_path(self.path, "correct data.path"))

        def parse() -> Dataset:
            fields = _read_task(files, home, self.shape, self.num_classes)
            return Dataset(
                name="leaf", source=f"JSON files in {Path(self.path).name}", licence="as its owner says", **fields
            )

        return load_cached(self, [path for part in files for path in part], parse)


@dataclass(frozen=True, kw_only=True)
class Femnist:
    """LEAF's FEMNIST: digits and letters by writer, 62 classes, 28 x 28, grey, black on white.

    Background is 1.0 and ink 0.0, unlike in MNIST. Classes are the digits, then A to Z, then a to
    z.

    Args:
        folder: the task's folder within the data folder's `leaf`, such as `femnist-digits` for
            digits only.

    References:
        [Caldas2018].
    """

    paper: ClassVar[Paper] = cite("Caldas2018")

    folder: str = "femnist"

    def load(self, folder: Path | None) -> Dataset:
        """Read `leaf/FOLDER/data/train/*.json` and `leaf/FOLDER/data/test/*.json`."""
        home = require_data_folder(folder, "femnist")
        task_folder = home / "leaf" / self.folder
        remedy = f"LEAF's data/femnist/preprocess.sh writes data/femnist/data; copy that to {task_folder}/data"
        files = _find_files([task_folder], remedy)

        def parse() -> Dataset:
            fields = _read_task(files, home, (1, 28, 28), 62)
            fields["class_names"] = tuple(digits + ascii_uppercase + ascii_lowercase)
            source = "S. Caldas et al.: LEAF, A Benchmark for Federated Settings (2018), from NIST Special Database 19"
            return Dataset(name="femnist", source=source, licence="BSD-2-Clause (LEAF's code)", **fields)

        return load_cached(self, [path for part in files for path in part], parse)


def _find_files(candidates: Sequence[Path], remedy: str) -> tuple[list[Path], list[Path]]:
    """Return the JSON files to train and to test on, of the first folder that has any."""
    homes = [folder / inner for folder in candidates for inner in ("data", ".")]
    home = next((home for home in homes if (home / "train").is_dir()), None)
    if home is None:
        raise DataError(f"{homes[0] / 'train'}: no such folder; {remedy}")
    parts = []
    for name in ("train", "test"):
        paths = sorted(path for path in (home / name).glob("*.json") if path.is_file())
        if not paths:
            raise DataError(f"{home / name}: holds no .json file, expected the {name} part of a LEAF task; {remedy}")
        parts.append(paths)
    return parts[0], parts[1]


def _read_task(
    files: tuple[list[Path], list[Path]], home: Path, shape: tuple[int, ...] | None, num_classes: int | None
) -> dict[str, Any]:
    """Return the fields of `Dataset` that follow from the files to train and to test on."""
    reader = LeafFiles(num_classes)
    train_paths, test_paths = files
    train = reader.read([verify_checksum(path, home) for path in train_paths])
    test = reader.read([verify_checksum(path, home) for path in test_paths])
    task_folder = train_paths[0].parent.parent
    fields: dict[str, Any] = {"group_names": tuple(reader.users)}

    # Classes: LEAF's characters, or numbers.
    if reader.letters:
        fields |= {"num_classes": len(LETTERS), "class_names": tuple(LETTERS)}
    else:
        fields["num_classes"] = num_classes or int(max(train.labels.max(), test.labels.max())) + 1
        if num_classes is None and fields["num_classes"] > _MAX_CLASSES:
            raise DataError(
                f"{task_folder}: a y is {fields['num_classes'] - 1}, which would make more than {_MAX_CLASSES} "
                "classes; correct the file, or set data.num_classes"
            )
        if fields["num_classes"] < 2:
            raise DataError(f"{task_folder}: each y is 0, expected at least two classes")

    # Inputs: texts, images or rows of a table.
    if reader.texts:
        if shape is not None:
            raise ConfigError("shape: expected none for texts, whose length is that of the file; remove it")
        scale, shape = None, (reader.size,)
        fields |= {"vocabulary": len(LETTERS), "tokens": tuple(LETTERS), "modality": "text"}
    else:
        low = float(min(train.inputs.min(), test.inputs.min()))
        high = float(max(train.inputs.max(), test.inputs.max()))
        in_unit_range = low >= 0 and high <= 1
        scale, shape = 1.0, shape or _guess_shape(reader.size, in_unit_range)
        if math.prod(shape) != reader.size:
            raise ConfigError(
                f"shape: {list(shape)} is for {math.prod(shape)} numbers, but {task_folder} has {reader.size}"
            )
        is_image = infer_modality(shape) == "image"
        fields["modality"] = "image" if is_image else "table"
        fields["value_range"] = (0.0, 1.0) if is_image and in_unit_range else (low, high)
        fields["columns"] = () if is_image else numeric_columns(reader.size)

    for name, part in (("train", train), ("test", test)):
        raw = part.inputs.reshape(-1, *shape)
        fields[name] = Examples(raw=raw, labels=part.labels, scale=scale, groups=part.groups)
    return fields


def _guess_shape(size: int, in_unit_range: bool) -> tuple[int, ...]:
    """Return the shape of a square grey image if the numbers may be one, else of a row."""
    side = math.isqrt(size)
    return (1, side, side) if in_unit_range and side >= 8 and side**2 == size else (size,)
