"""Checks of data sets."""

from __future__ import annotations

from typing import Any

import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, NotChecked, expect
from fedsim.data import Dataset, Examples
from fedsim.federation.data_folder import find_data_folder
from fedsim.modalities import check_modality

_SAMPLE_SIZE = 500
"""Number of examples of each part that are checked."""


def names_its_source(subject: CheckedPlugin) -> None:
    """It loads, and says where its data come from and what may be done with them."""
    dataset = _load_dataset(subject)
    for attribute in ("name", "source", "licence"):
        expect(getattr(dataset, attribute), f"its {attribute} is empty")
    for part, examples in _parts(dataset):
        expect(len(examples), f"it has no {part} examples")
        expect(len(examples.raw) == len(examples.labels), f"its {part} examples and labels differ in number")
        groups = examples.groups
        expect(groups is None or len(groups) == len(examples), f"its {part} groups are not one for each example")


def inputs_are_in_their_range(subject: CheckedPlugin) -> None:
    """Its inputs are of one shape and type, and within the range that it names."""
    dataset = _load_dataset(subject)
    low, high = (0, dataset.vocabulary - 1) if dataset.vocabulary else dataset.value_range
    dtype = torch.int64 if dataset.vocabulary else torch.float32
    for part, examples in _parts(dataset):
        sample = examples.inputs(slice(0, _SAMPLE_SIZE))
        expect(sample.dtype == dtype, f"its {part} inputs are {sample.dtype}, expected {dtype}")
        shape = tuple(sample.shape[1:])
        expect(shape == dataset.task.input_shape, f"its {part} inputs are of shape {shape}, unlike the training ones")
        least, most = sample.min().item(), sample.max().item()
        expect(low <= least < most <= high, f"its {part} inputs go from {least} to {most}, expected [{low}, {high}]")


def labels_fit(subject: CheckedPlugin) -> None:
    """Its labels are class indices, or finite targets of a regression."""
    dataset = _load_dataset(subject)
    for part, examples in _parts(dataset):
        labels = examples.labels
        if dataset.task.goal not in ("classes", "masks"):
            expect(labels.dtype == torch.float32, f"its {part} targets are {labels.dtype}, expected torch.float32")
            expect(labels.isfinite().all(), f"its {part} targets are NaN or infinite")
            continue
        expect(labels.dtype == torch.int64, f"its {part} labels are {labels.dtype}, expected torch.int64")
        least, most, last_class = int(labels.min()), int(labels.max()), dataset.task.outputs - 1
        expect(
            0 <= least < most <= last_class,
            f"its {part} labels go from {least} to {most}, expected several from 0 to {last_class}",
        )


def fits_its_modality(subject: CheckedPlugin) -> None:
    """Its examples have the axes of the modality that it names."""
    check_modality(_load_dataset(subject).task, subject.name)


def is_deterministic(subject: CheckedPlugin) -> None:
    """It is the same when loaded again, split the same way, and uses no global generator."""
    first = _load_dataset(subject)
    with common.expect_untouched_generators():
        second: Dataset = subject.build().load(find_data_folder())
    for (part, examples), (_, reloaded) in zip(_parts(first), _parts(second), strict=True):
        same = torch.equal(examples.raw, reloaded.raw) and torch.equal(examples.labels, reloaded.labels)
        expect(same, f"loaded again, its {part} examples are others or in another order; split by a fixed key")


CHECKS = (*common.CHECKS, names_its_source, inputs_are_in_their_range, fits_its_modality, labels_fit, is_deterministic)


def _load_dataset(subject: CheckedPlugin) -> Dataset:
    if "dataset" not in subject.cache:
        try:
            subject.cache["dataset"] = subject.build().load(find_data_folder())
        except (ConfigError, DataError) as error:
            raise NotChecked(str(error)) from error
    dataset: Any = subject.cache["dataset"]
    if not isinstance(dataset, Dataset):
        raise ContractViolation(f"load returns a {type(dataset).__name__}, expected a fedsim.Dataset")
    return dataset


def _parts(dataset: Dataset) -> tuple[tuple[str, Examples], tuple[str, Examples]]:
    return ("training", dataset.train), ("test", dataset.test)
