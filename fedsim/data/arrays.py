"""The user's own arrays: a NumPy file with examples of any modality and their labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.base.constraints import CheckedSettings, PositiveShareBelowOne
from fedsim.base.errors import ConfigError, DataError, join_first
from fedsim.base.task import describe_ignored_pixels
from fedsim.data import Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.files import describe_error, find_named_file, verify_checksum
from fedsim.data.holdout import choose_distinct

log = logging.getLogger(__name__)

_MAX_CLASSES = 1_000_000
"""Most classes; a larger label is an identifier, for which no network has an output."""
_MAX_LISTED = 5
"""Most classes that a sentence lists."""
_MOST_ROUNDING = 1e-3
"""Most that rounding to float32 may take of the spread of a channel or feature."""


@dataclass(frozen=True, kw_only=True)
class ArrayFile(CheckedSettings):
    """Arrays of your own in a NumPy `.npz` file: time series, audio, images or rows of numbers.

    The file holds `x_train` and `y_train`, `x_test` and `y_test`; or `x` and `y`, of which part is
    held out. `x` is `example ...` with the axes of the modality, `channel time` of a series; `y` is
    one integer an example, its class, or one real number, the target of a regression; or `example target`, several
    labels of an example, each the integer 0 or 1, or several real numbers; or `example height width`, masks of images,
    the integer class of each pixel, all of which count.

    Args:
        path: the file, within the data folder or absolute.
        modality: kind of the examples; by default it follows from the number of axes.
        value_range: lowest and highest value of an input; by default those of the file.
        test_fraction: share of `x` to test on, in (0, 1); equal ones stay on one side. Not used where there is an
            `x_test`.
    """

    path: str = ""
    modality: str = ""
    value_range: tuple[float, float] | None = None
    test_fraction: PositiveShareBelowOne = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise ConfigError(f"value_range: expected [lowest, highest], got {list(self.value_range)}")

    def load(self, folder: Path | None) -> Dataset:
        """Read the file `path`."""
        if not self.path:
            raise DataError("data: 'npz' needs a path; set data.path to a file that numpy.savez wrote")
        home, path = find_named_file(self.path, folder, "npz")
        dataset = load_cached(self, [path], lambda: self._parse(verify_checksum(path, home)))
        _warn_of_real_classes(path, dataset)
        _warn_of_absent_classes(path, dataset)
        return dataset

    def _parse(self, path: Path) -> Dataset:
        arrays = _read_arrays(path)
        labels, fields = _make_labels(path, arrays)
        inputs = {name: array for name, array in arrays.items() if name.startswith("x")}
        low = min(float(array.min()) for array in inputs.values())
        high = max(float(array.max()) for array in inputs.values())
        for part in ("train", "test"):
            raw = inputs.get(f"x_{part}")
            part_labels = labels.get(f"y_{part}")
            if raw is None or part_labels is None:
                mask = choose_distinct(inputs["x"], _strata(labels["y"]), self.test_fraction)
                if not mask.any() or mask.all():
                    side = "train" if mask.all() else "test"
                    raise DataError(
                        f"{path}: of {len(mask)} examples, of which equal ones stay on one side, test_fraction = "
                        f"{self.test_fraction} leaves none to {side} on; change it, or write x_train, y_train, x_test "
                        "and y_test"
                    )
                mask = mask if part == "test" else ~mask
                raw, part_labels = inputs["x"][mask], labels["y"][mask]
            fields[part] = Examples(raw=raw, labels=part_labels, scale=1.0)
        return Dataset(
            name="npz",
            source=path.name,
            licence="as its owner says",
            modality=self.modality,
            value_range=self.value_range or (low, high if high > low else low + 1),
            **fields,
        )


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays by name: `x` and `y`, or each of them for both parts."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if complaint := memory_complaint(sum(member.file_size for member in file.zip.infolist())):
                raise DataError(f"{path}: its arrays {complaint}; keep fewer examples in it")
            content = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, BadZipFile, AttributeError, TypeError, MemoryError) as error:
        raise DataError(f"{path}: is not a file of arrays, {describe_error(error)}; write it by numpy.savez") from error
    names = ("x", "y") if "x" in content else ("x_train", "y_train", "x_test", "y_test")
    arrays: dict[str, Tensor] = {}
    for name in names:
        if name not in content:
            raise DataError(
                f"{path}: has no array '{name}', only {', '.join(sorted(content)) or 'none'}; name them x and y, or "
                "x_train, y_train, x_test and y_test"
            )
        if content[name].dtype.kind not in "fiub":
            raise DataError(f"{path}: '{name}' holds {content[name].dtype}, expected numbers")
        _check_labels(path, name, content[name])
        has_fewer_axes = content[name].ndim < (2 if name.startswith("x") else 1)
        if has_fewer_axes or not content[name].size or (name.startswith("y") and content[name].ndim > 3):
            raise DataError(
                f"{path}: '{name}' has the shape {content[name].shape}, expected examples by their axes in x and one "
                "label or target an example in y, or a row or a mask of them"
            )
        if name.startswith("x"):
            arrays[name] = torch.from_numpy(_round_inputs(path, name, content[name]))
        else:
            is_real = content[name].dtype.kind == "f"
            arrays[name] = torch.from_numpy(content[name].astype(np.float64 if is_real else np.int64))
    for name in names:
        if len(arrays[name]) != len(arrays[name.replace("x", "y", 1)]):
            raise DataError(f"{path}: '{name}' has {len(arrays[name])} examples, but not as many labels; correct it")
    return arrays


def _check_labels(path: Path, name: str, values: NDArray[Any]) -> None:
    """Raise DataError where labels hold what is neither a class nor a number to predict."""
    if not name.startswith("y") or not values.size or not values.ndim:  # what is one number is refused by its shape
        return
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        example = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1)))
        raise DataError(
            f"{path}: '{name}' has a NaN or an infinite number in example {example}; fill it, or leave it out"
        )
    if values.dtype.kind in "iu" and values.max() >= _MAX_CLASSES:
        raise DataError(
            f"{path}: '{name}' holds {values.max()}, and classes are numbered from 0 to below {_MAX_CLASSES}; write "
            "their indices, as np.unique(y, return_inverse=True) gives them"
        )


def _round_inputs(path: Path, name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """Return inputs in float32."""
    rounded = np.ascontiguousarray(values, np.float32)
    is_rounded = values.dtype.itemsize > 4 or (values.dtype.itemsize == 4 and values.dtype.kind in "iu")
    for channel in range(values.shape[1]) if is_rounded else ():
        exact = values[:, channel].astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite numbers are refused with those of any data set
            spread, error = np.ptp(exact), np.abs(exact - rounded[:, channel]).max()
        if spread > 0 and error > _MOST_ROUNDING * spread:
            raise DataError(
                f"{path}: '{name}' holds from {exact.min():.12g} to {exact.max():.12g} at [:, {channel}], which 32 "
                f"bits round by up to {error:.3g}; subtract an offset, or leave out what is an identifier"
            )
    return rounded


def _make_labels(path: Path, arrays: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the labels by name, and the fields of `Dataset` that follow from them.

    Targets of a regression are standardised by the training ones, each number by itself.
    """
    labels = {name: array for name, array in arrays.items() if name.startswith("y")}
    train = labels.get("y_train", labels.get("y"))
    assert train is not None
    if len({part.shape[1:] for part in labels.values()}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in labels.values())
        raise DataError(f"{path}: the targets to train and to test on have the shapes {shapes}; correct them")
    if len({part.is_floating_point() for part in labels.values()}) > 1:
        raise DataError(
            f"{path}: of the targets to train and to test on, one holds real numbers and the other integers; write "
            "both as integers, which are classes, or both as real numbers to predict"
        )
    if train.ndim == 2 and train.shape[1] == 1:
        labels = {name: part[:, 0] for name, part in labels.items()}
        train = train[:, 0]
    if train.ndim > 2:
        return _make_masks(path, labels, tuple(arrays["x" if "x" in arrays else "x_train"].shape))
    if train.ndim > 1:
        return _make_vectors(path, labels, train)
    if not train.is_floating_point():
        highest = max(int(part.max()) for part in labels.values())
        indices = {name: part.to(torch.int64) for name, part in labels.items()}
        return indices, {"num_classes": max(2, highest + 1)}
    mean, deviation = float(train.mean()), float(train.std(correction=0))
    if deviation == 0:
        raise DataError(f"{path}: the target is {mean:g} in every example to train on, expected a number to predict")
    targets = {name: ((part.double() - mean) / deviation).float() for name, part in labels.items()}
    return targets, {"num_classes": 0, "target": (mean, deviation)}


def _warn_of_real_classes(path: Path, dataset: Dataset) -> None:
    """Warn where numbers to predict may be classes: a few whole ones without a gap, from 0 or 1 on, each repeated."""
    if dataset.task.goal != "numbers" or dataset.train.labels.ndim > 1:
        return
    mean, deviation = dataset.target
    values = torch.unique(dataset.train.labels).double() * deviation + mean
    first, count = round(float(values[0])), len(values)
    without_gap = first + torch.arange(count, dtype=torch.float64)
    if first in (0, 1) and 2 * count <= len(dataset.train) and torch.allclose(values, without_gap, atol=1e-4):
        log.warning(
            "%s: y holds the real numbers %d to %d alone, which are learned as numbers to predict; write them as "
            "integers if they are classes",
            path,
            first,
            first + count - 1,
        )


def _warn_of_absent_classes(path: Path, dataset: Dataset) -> None:
    """Warn where no example to train on is of a class, which the model counts all the same, as do guesses of labels."""
    if dataset.task.goal != "classes":
        return
    present = set(torch.unique(dataset.train.labels).tolist())
    absent = [label for label in range(dataset.num_classes) if label not in present]
    if absent:
        log.warning(
            "%s: y has no example to train on of %d of the classes 0 to %d (%s); number the others from 0 on, "
            "unless the absent ones occur elsewhere",
            path,
            len(absent),
            dataset.num_classes - 1,
            join_first(absent, _MAX_LISTED),
        )


def _make_masks(
    path: Path, labels: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return as `_make_labels` what masks of images of this `shape` make."""
    for name, part in labels.items():
        if part.is_floating_point() or part.min() < 0 or len(shape) != 4 or part.shape[1:] != shape[2:]:
            raise DataError(
                f"{path}: '{name}' holds {part.dtype} of shape {tuple(part.shape)} beside x of shape {shape}, expected "
                "the class of each pixel, an integer of at least 0, of images (example, channel, height, width)"
            )
    if complaint := describe_ignored_pixels(torch.cat([part.flatten() for part in labels.values()])):
        raise DataError(f"{path}: y: {complaint}")
    highest = max(int(part.max()) for part in labels.values())
    return {name: part.long() for name, part in labels.items()}, {
        "num_classes": 0,
        "mask_classes": max(2, highest + 1),
    }


def _make_vectors(path: Path, labels: Mapping[str, Tensor], train: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return as `_make_labels` what rows of labels or of numbers make."""
    if train.is_floating_point():
        if all(bool(((part == 0) | (part == 1)).all()) for part in labels.values()):
            raise DataError(
                f"{path}: y has rows of real numbers that are all 0 or 1; write labels, of which an example may have "
                "any, as integers, and numbers to predict in another unit"
            )
        mean, deviation = train.double().mean(0), train.double().std(0, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)
        targets = {name: ((part.double() - mean) / deviation).float() for name, part in labels.items()}
        return targets, {"num_classes": 0, "num_targets": train.shape[1]}
    for name, part in labels.items():
        if not ((part == 0) | (part == 1)).all():
            raise DataError(
                f"{path}: '{name}' has rows of integers from {int(part.min())} to {int(part.max())}, expected 0 or 1, "
                "whether an example has each label; write numbers to predict as real ones"
            )
    return {name: part.float() for name, part in labels.items()}, {"num_classes": 0, "num_labels": train.shape[1]}


def _strata(labels: Tensor) -> Tensor:
    """Return the classes; of other targets their order, so that all sizes or all kinds are held out."""
    if labels.ndim > 2:  # hardly two masks are the same
        return torch.zeros(len(labels), dtype=torch.int64)
    if labels.ndim > 1:
        kinds: Tensor = torch.unique(labels, dim=0, return_inverse=True)[1]
        return kinds
    return labels.argsort().argsort() if labels.is_floating_point() else labels
