"""Checks of a data set, whoever wrote it: types, shapes, labels, values and groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.machine import total_memory
from fedsim.base.task import Task
from fedsim.data import Dataset, Examples

_MOST_CHANNELS = 4
"""Most channels of an image whose last axis has them, as images of most libraries; larger ones are not so narrow."""
_FEWEST_ROWS = 10
"""Rows of labels from which on it is no chance that each has one label."""


def memory_complaint(needed: float) -> str:
    """Return a complaint if `needed` bytes are more than the memory of this machine or container, else an empty text.

    The complaint is the middle of a sentence: "take 90.0 GB, more than the 64.0 GB of memory here".
    """
    memory = total_memory()
    if needed <= memory:
        return ""
    return f"take {needed / 1e9:.1f} GB, more than the {memory / 1e9:.1f} GB of memory here"


def check_dataset(dataset: Any, name: str) -> Dataset:
    """Check that `dataset` is one and is consistent, and return it.

    Raises:
        DataError: it is no data set; fields are no tensors, or of types that do not fit; a part is empty; images
            have their channels last; columns or names do not describe the data; inputs and labels differ in number;
            labels are outside the classes, or are classes as rows of 0 and 1; there are NaN or values outside the
            range; or groups have no name.
    """
    if not isinstance(dataset, Dataset):
        raise DataError(f"data: '{name}' gave a {type(dataset).__name__}, expected a fedsim.data.Dataset")
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        for field in ("raw", "labels", "groups"):
            tensor = getattr(examples, field)
            if not isinstance(tensor, Tensor) and (field, tensor) != ("groups", None):
                got = type(tensor).__name__
                raise DataError(f"data: the {part} part of '{name}' has {field} of type {got}, expected a torch.Tensor")
    if dataset.train.raw.shape[1:] != dataset.test.raw.shape[1:]:
        shapes = f"{tuple(dataset.train.raw.shape[1:])} and {tuple(dataset.test.raw.shape[1:])}"
        raise DataError(f"data: '{name}' has training and test examples of different shapes, {shapes}")
    if complaint := _check_axes(dataset.task) or _check_names(dataset) or _check_columns(dataset):
        raise DataError(f"data: '{name}' {complaint}")
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        complaint = (
            _check_shape(examples)
            or _check_types(dataset, examples)
            or _check_labels(dataset, examples)
            or _check_inputs(dataset, examples)
            or _check_groups(dataset, examples)
        )
        if complaint:
            raise DataError(f"data: the {part} part of '{name}' {complaint}")
    if complaint := _check_label_counts(dataset):
        raise DataError(f"data: '{name}' {complaint}")
    return dataset


# Each of these returns the end of a sentence on what is wrong, or an empty text.


def _check_axes(task: Task) -> str:
    shape = task.input_shape
    # Feature maps of (64, 4, 4), say, are as small as a number of channels in both axes.
    has_channels_last = len(shape) == 3 and min(shape[:2]) > _MOST_CHANNELS >= shape[2]
    if task.modality != "image" or (len(shape) == 3 and not has_channels_last):
        return ""
    remedies = {2: "add an axis of one channel", 3: "x.transpose(0, 3, 1, 2) of NumPy puts channels first"}
    remedy = remedies.get(len(shape), "reshape them, or name another modality")
    return f"has images of shape {shape}, expected channel, height and width, in this order; {remedy}"


def _check_names(dataset: Dataset) -> str:
    task = dataset.task
    for field, names, count in (
        ("class_names", dataset.class_names, task.outputs),
        ("tokens", dataset.tokens, dataset.vocabulary),
    ):
        if names and len(names) != count:
            return f"has {len(names)} {field} for {count}; name all of them, or none"
    return ""


def _check_columns(dataset: Dataset) -> str:
    """Check that columns are all features of a table, in their order, and that categories are 0 or 1."""
    if not dataset.columns:
        return ""
    position, shape = 0, dataset.task.input_shape
    for column in dataset.columns:
        if column.start != position:
            return f"has the column '{column.name}' from feature {column.start} on, expected {position}, the next one"
        position = column.features.stop
    if (position,) != shape:
        return f"has columns of {position} features in all, and inputs of shape {shape}; let columns describe them all"
    for column in dataset.columns:
        for examples in (dataset.train, dataset.test) if column.categories else ():
            features = examples.raw[:, column.features] * (1.0 if examples.scale is None else examples.scale)
            if not (((features == 0) | (features == 1)).all() and (features.sum(1) == 1).all()):
                return f"has a column '{column.name}' of categories that is not 1 in one feature and 0 in the others"
    return ""


def _check_types(dataset: Dataset, examples: Examples) -> str:
    raw, is_whole = examples.raw, not (examples.raw.is_floating_point() or examples.raw.is_complex())
    if dataset.vocabulary and (examples.scale is not None or not is_whole):
        return f"has tokens of type {raw.dtype} and scale {examples.scale}, expected integers, and None; fix them"
    if not dataset.vocabulary and examples.scale is None:
        return "has no scale, and so its numbers would be cut to integers as tokens are; give it, as scale=1.0"
    return f"has inputs of type {raw.dtype}, expected real numbers" if raw.is_complex() else ""


def _check_shape(examples: Examples) -> str:
    if not len(examples):
        return "is empty"
    if len(examples.raw) != len(examples.labels):
        return f"holds {len(examples.raw)} inputs but {len(examples.labels)} labels"
    return ""


def _check_labels(dataset: Dataset, examples: Examples) -> str:
    labels, task = examples.labels, dataset.task
    if tuple(labels.shape[1:]) != task.target_shape:
        expected = f"{task.outputs} numbers an example" if task.target_shape else "one an example"
        if task.goal == "masks":
            expected = f"masks of {' x '.join(map(str, task.target_shape))} pixels"
        return f"has labels of shape {tuple(labels.shape)}, expected {expected} for {task.describe_goal()}"
    if task.goal not in ("classes", "masks"):
        if labels.dtype != torch.float32:
            return f"has targets of type {labels.dtype}, expected float32 for {task.describe_goal()} (num_classes = 0)"
        if task.goal == "labels" and not ((labels == 0) | (labels == 1)).all():
            return "has labels other than 0 and 1, which say whether an example has each; fix the data or num_labels"
        return "" if labels.isfinite().all() else "has a target that is NaN or infinite"
    if labels.dtype != torch.int64:
        return f"has labels of type {labels.dtype}, expected int64 for {task.describe_goal()}"
    is_wrong = (labels < 0) | (labels >= task.outputs)
    if is_wrong.any():
        example = int(is_wrong.nonzero()[0, 0])
        return (
            f"has the label {int(labels[is_wrong][0])} at example {example}, expected classes from 0 to "
            f"{task.outputs - 1}; fix the data or {'mask_classes' if task.goal == 'masks' else 'num_classes'}"
        )
    return ""


def _check_label_counts(dataset: Dataset) -> str:
    rows = [dataset.train.labels, dataset.test.labels]
    is_single = dataset.task.goal == "labels" and all(bool((part.sum(1) == 1).all()) for part in rows)
    if not is_single or sum(map(len, rows)) < _FEWEST_ROWS:
        return ""
    return (
        "has exactly one label an example, so that labels are classes, which are learned otherwise; write the index of "
        "each example's class, as y.argmax(1) gives it"
    )


def _check_inputs(dataset: Dataset, examples: Examples) -> str:
    low, high = (0, dataset.vocabulary - 1) if dataset.vocabulary else dataset.value_range
    lowest, highest = _input_range(examples)
    if not lowest <= highest:
        first = int(examples.raw.isnan().flatten(1).any(1).nonzero()[0])
        return f"has a NaN in example {first}"
    if not math.isfinite(highest - lowest):
        return f"has inputs from {lowest:g} to {highest:g}, expected finite numbers; fix the data"
    tolerance = 0 if dataset.vocabulary else 1e-6 * (high - low)
    if lowest < low - tolerance or highest > high + tolerance:
        expected = f"[{low:g}, {high:g}]"
        if dataset.vocabulary:
            expected = f"the vocabulary of {dataset.vocabulary} tokens"
        return f"has inputs from {lowest:g} to {highest:g}, outside {expected}; fix the data or its range"
    return ""


def _input_range(examples: Examples) -> tuple[float, float]:
    """Return the smallest and the largest input; NaN where there is one."""
    scale = 1.0 if examples.scale is None else examples.scale
    if examples.raw.dtype == torch.uint8 and scale <= 1 / 255:
        return 0.0, 255 * scale  # the type's range: the true one would need all mapped images
    return examples.raw.min().item() * scale, examples.raw.max().item() * scale


def _check_groups(dataset: Dataset, examples: Examples) -> str:
    groups = examples.groups
    if groups is None:
        return ""
    if groups.shape != (len(examples),):
        return f"has groups for {len(groups)} of {len(examples)} examples, expected one an example"
    if groups.min() < 0 or groups.max() >= len(dataset.group_names):
        return f"has groups from {int(groups.min())} to {int(groups.max())}, but {len(dataset.group_names)} group names"
    return ""
