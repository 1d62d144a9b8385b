"""Check the tensors of a finding: form, type and range of what an attack claims."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.base.errors import AttackError

MAX_CLASSES = 1 << 24
"""Upper limit of class indices and tokens: counting takes memory in proportion to the largest."""

_CURVE_NAME = re.compile(r"\w[\w .+-]{0,39}")

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

CLIENT_ID_DTYPES = (*INTEGER_DTYPES, torch.uint64)


def check_dense(name: str, tensor: object) -> None:
    """Raise AttackError unless `tensor` is a dense tensor of real numbers."""
    if not isinstance(tensor, Tensor):
        raise AttackError(f"the attack claims {name} of type {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
        raise tensor_error(name, tensor, "a dense tensor of real numbers")


def check_tensor(name: str, tensor: object) -> None:
    """Raise AttackError unless `tensor` is a dense tensor of real numbers and not empty."""
    check_dense(name, tensor)
    assert isinstance(tensor, Tensor)
    if not tensor.numel():
        raise tensor_error(name, tensor, "at least one value")


def check_unit_range(name: str, tensor: Tensor) -> None:
    """Raise AttackError unless `tensor` has float32 numbers in [0, 1]."""
    check_tensor(name, tensor)
    if tensor.dtype != torch.float32:
        raise tensor_error(name, tensor, "torch.float32")
    if not ((tensor >= 0) & (tensor <= 1)).all():
        raise AttackError(
            f"the attack claims {name} outside [0, 1], or NaN; of inputs of the model, claim (inputs - low) / (high - "
            "low) by value_range"
        )


def check_integers(
    name: str,
    tensor: Tensor,
    count: int,
    limit: int,
    dtypes: Sequence[torch.dtype] = INTEGER_DTYPES,
) -> None:
    """Raise AttackError unless `tensor` has `count` integers from 0 to below `limit`."""
    check_tensor(name, tensor)
    if tensor.ndim != 1 or len(tensor) != count or tensor.dtype not in dtypes:
        raise tensor_error(name, tensor, f"integers of shape ({count},)")
    numbers = tensor.tolist()  # torch has no minimum of uint64
    if min(numbers) < 0 or max(numbers) >= limit:
        raise AttackError(f"the attack claims {name} below 0 or from {limit} on")


def check_messages(clients: Tensor, rounds: Tensor, count: int) -> None:
    """Raise AttackError unless `count` messages are named by client and round, each once."""
    check_integers("clients", clients, count, 1 << 64, CLIENT_ID_DTYPES)
    check_integers("rounds", rounds, count, 1 << 63)
    if len(set(zip(clients.tolist(), rounds.tolist(), strict=True))) < count:
        raise AttackError("the attack scores a message twice, expected each once")


def check_labels(labels: Tensor, count: int, noun: str) -> None:
    """Raise AttackError unless `labels` are class indices, targets, rows of targets or masks, one for each example.

    Args:
        count: number of examples.
        noun: of the examples, for errors.
    """
    check_tensor("labels", labels)
    are_rows = labels.ndim == 2 and labels.is_floating_point()
    are_masks = labels.ndim == 3 and not labels.is_floating_point()
    if labels.ndim != 1 and not ((are_rows or are_masks) and labels.numel()):
        raise tensor_error(
            "labels",
            labels,
            f"one for each of {count} {noun}, or floating point numbers in rows, or masks of integers",
        )
    if len(labels) != count:
        raise AttackError(f"the attack claims {count} {noun} but {len(labels)} labels")
    if not labels.is_floating_point():
        if labels.dtype not in INTEGER_DTYPES:
            raise tensor_error("labels", labels, "integers, or of a regression floating point numbers")
        if int(labels.min()) < 0 or int(labels.max()) >= MAX_CLASSES:
            raise AttackError("the attack claims labels that are not class indices")
    elif not labels.isfinite().all():
        raise AttackError("the attack claims targets that are NaN or infinite")


def check_trace(trace: Mapping[str, Tensor]) -> None:
    """Raise AttackError unless `trace` maps names that a report can show to curves."""
    if not isinstance(trace, Mapping):
        raise AttackError(f"the attack returns a trace that is {type(trace).__name__}, expected names to curves")
    for name, values in trace.items():
        if not isinstance(name, str) or not _CURVE_NAME.fullmatch(name):
            raise AttackError(
                f"the attack calls a curve of its trace {name!r}, expected at most 40 letters, digits or any of ' .+-'"
            )
        check_tensor(f"a curve '{name}'", values)
        if values.ndim != 1 or not values.is_floating_point():
            raise tensor_error(f"a curve '{name}'", values, "one floating point number an iteration")


def tensor_error(name: str, tensor: Tensor, expected: str) -> AttackError:
    """Return the error that says what `tensor` is, and what was `expected` instead."""
    form = tensor.dtype if tensor.layout == torch.strided else f"{tensor.layout}, {tensor.dtype}"
    return AttackError(f"the attack claims {name} of {form}, shape {tuple(tensor.shape)}, expected {expected}")
