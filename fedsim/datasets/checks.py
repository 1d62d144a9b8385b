"""What every data set has to keep to, anybody's too; one sentence where it does not."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fedsim.datasets import Dataset, Examples
from fedsim.errors import DataError


def beyond_memory(needed: float) -> str:
    """What is to be said of `needed` bytes if they are more than this machine's memory, else nothing."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"take {needed / 1e9:.0f} GB, more than the {there / 1e9:.0f} GB of memory here" if needed > there else ""


def check_dataset(dataset: Any, name: str) -> Dataset:
    """`dataset` again, if it is one and holds what it promises.

    Args:
        name: what the experiment calls it.

    Raises:
        DataError: no tensors, no examples, as many labels as inputs, labels outside the classes, NaN, values
            outside the range, groups without a name.
    """
    if not isinstance(dataset, Dataset):
        raise DataError(f"data: '{name}' gave a {type(dataset).__name__}, expected a fedsim.datasets.Dataset")
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        for what in ("raw", "labels", "groups"):
            tensor = getattr(examples, what)
            if not isinstance(tensor, Tensor) and (what, tensor) != ("groups", None):
                got = type(tensor).__name__
                raise DataError(f"data: the {part} part of '{name}' has {what} of type {got}, expected a torch.Tensor")
    if dataset.train.raw.shape[1:] != dataset.test.raw.shape[1:]:
        shapes = f"{tuple(dataset.train.raw.shape[1:])} and {tuple(dataset.test.raw.shape[1:])}"
        raise DataError(f"data: '{name}' has training and test examples of different shapes, {shapes}")
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        if complaint := _shape(examples) or _labels(dataset, examples) or _inputs(dataset, examples):
            raise DataError(f"data: the {part} part of '{name}' {complaint}")
        if examples.groups is not None and (complaint := _groups(dataset, examples.groups, len(examples))):
            raise DataError(f"data: the {part} part of '{name}' {complaint}")
    return dataset


def _shape(examples: Examples) -> str:
    if not len(examples):
        return "is empty"
    if len(examples.raw) != len(examples.labels):
        return f"holds {len(examples.raw)} inputs but {len(examples.labels)} labels"
    if examples.raw.ndim not in (2, 4):
        return f"has inputs of shape {tuple(examples.raw.shape[1:])}, expected (channel, height, width) or (feature,)"
    return ""


def _labels(dataset: Dataset, examples: Examples) -> str:
    labels = examples.labels
    if labels.ndim != 1:
        return f"has labels of shape {tuple(labels.shape)}, expected one an example"
    if not dataset.num_classes:
        if labels.dtype != torch.float32:
            return f"has targets of type {labels.dtype}, expected float32 for a regression (num_classes = 0)"
        return "" if labels.isfinite().all() else "has a target that is NaN or infinite"
    if labels.dtype != torch.int64:
        return f"has labels of type {labels.dtype}, expected int64 for {dataset.num_classes} classes"
    wrong = (labels < 0) | (labels >= dataset.num_classes)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        return (
            f"has the label {int(labels[place])} at example {place}, expected classes from 0 to "
            f"{dataset.num_classes - 1}; mend the data or num_classes"
        )
    return ""


def _inputs(dataset: Dataset, examples: Examples) -> str:
    low, high = (0, dataset.vocabulary - 1) if dataset.vocabulary else dataset.value_range
    lowest, highest = _ends(examples)
    if not lowest <= highest:
        return f"has a NaN in example {_first_nan(examples.raw)}"
    slack = 0 if dataset.vocabulary else 1e-6 * (high - low)
    if lowest < low - slack or highest > high + slack:
        what = f"the vocabulary of {dataset.vocabulary} tokens" if dataset.vocabulary else f"[{low:g}, {high:g}]"
        return f"has inputs from {lowest:g} to {highest:g}, outside {what}; mend the data or its range"
    return ""


def _ends(examples: Examples) -> tuple[float, float]:
    """Smallest and largest input; NaN where there is one."""
    scale = 1.0 if examples.scale is None else examples.scale
    if examples.raw.dtype == torch.uint8 and scale <= 1 / 255:
        return 0.0, 255 * scale  # what the type can hold; looking at mapped images would read them all
    return examples.raw.min().item() * scale, examples.raw.max().item() * scale


def _first_nan(raw: Tensor) -> int:
    return int(raw.isnan().flatten(1).any(1).nonzero()[0])


def _groups(dataset: Dataset, groups: Tensor, count: int) -> str:
    if groups.shape != (count,):
        return f"says whose its examples are for {len(groups)} of {count} examples"
    if groups.min() < 0 or groups.max() >= len(dataset.group_names):
        return f"has groups from {int(groups.min())} to {int(groups.max())}, but {len(dataset.group_names)} group names"
    return ""
