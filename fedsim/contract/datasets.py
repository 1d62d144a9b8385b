"""What a data set keeps to."""

from __future__ import annotations

from typing import Any

import torch

from fedsim.contract import common
from fedsim.contract.checks import Broken, NotChecked, Subject, expect
from fedsim.datasets import Dataset, Examples
from fedsim.errors import ConfigError, DataError
from fedsim.experiments.build import data_folder

_LOOKED_AT = 500
"""Examples of each part that are checked."""


def says_what_it_is(subject: Subject) -> None:
    """It loads, and says where its data come from and what may be done with them."""
    dataset = _loaded(subject)
    for what in ("name", "source", "licence"):
        expect(getattr(dataset, what), f"its {what} is empty")
    for part, examples in _parts(dataset):
        expect(len(examples), f"its {part} examples are none")
        expect(len(examples.raw) == len(examples.labels), f"its {part} examples are not as many as their labels")
        groups = examples.groups
        expect(groups is None or len(groups) == len(examples), f"its {part} groups are not one for each example")


def inputs_are_in_their_range(subject: Subject) -> None:
    """Its inputs are of one shape and type, and within the range that it names."""
    dataset = _loaded(subject)
    low, high = (0, dataset.vocabulary - 1) if dataset.vocabulary else dataset.value_range
    dtype = torch.int64 if dataset.vocabulary else torch.float32
    for part, examples in _parts(dataset):
        sample = examples.inputs(slice(0, _LOOKED_AT))
        expect(sample.dtype == dtype, f"its {part} inputs are {sample.dtype}, expected {dtype}")
        shape = tuple(sample.shape[1:])
        expect(shape == dataset.task.input_shape, f"its {part} inputs are of shape {shape}, unlike the training ones")
        least, most = sample.min().item(), sample.max().item()
        expect(low <= least < most <= high, f"its {part} inputs go from {least} to {most}, expected [{low}, {high}]")


def labels_fit(subject: Subject) -> None:
    """Its labels are class indices, or finite targets of a regression."""
    dataset = _loaded(subject)
    for part, examples in _parts(dataset):
        labels = examples.labels
        if not dataset.num_classes:
            expect(labels.dtype == torch.float32, f"its {part} targets are {labels.dtype}, expected torch.float32")
            expect(labels.isfinite().all(), f"its {part} targets are NaN or infinite")
            continue
        expect(labels.dtype == torch.int64, f"its {part} labels are {labels.dtype}, expected torch.int64")
        least, most = int(labels.min()), int(labels.max())
        fit = 0 <= least < most < dataset.num_classes
        expect(
            fit, f"its {part} labels go from {least} to {most}, expected several from 0 to {dataset.num_classes - 1}"
        )


def is_the_same_each_time(subject: Subject) -> None:
    """Loaded again it is the same, split alike, and leaves the global generators alone."""
    first = _loaded(subject)
    with common.global_generators_untouched():
        again: Dataset = subject.build().load(data_folder())
    for (part, one), (_, other) in zip(_parts(first), _parts(again), strict=True):
        same = torch.equal(one.raw, other.raw) and torch.equal(one.labels, other.labels)
        expect(same, f"loaded again, its {part} examples are others or in another order; split by a fixed key")


CHECKS = (*common.CHECKS, says_what_it_is, inputs_are_in_their_range, labels_fit, is_the_same_each_time)


def _loaded(subject: Subject) -> Dataset:
    if "dataset" not in subject.kept:
        try:
            subject.kept["dataset"] = subject.build().load(data_folder())
        except (ConfigError, DataError) as error:
            raise NotChecked(str(error)) from error
    found: Any = subject.kept["dataset"]
    if not isinstance(found, Dataset):
        raise Broken(f"load returns a {type(found).__name__}, expected a fedsim.Dataset")
    return found


def _parts(dataset: Dataset) -> tuple[tuple[str, Examples], tuple[str, Examples]]:
    return ("training", dataset.train), ("test", dataset.test)
