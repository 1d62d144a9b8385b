"""Short representations of objects that hold tensors: shapes and ranges in place of contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from reprlib import repr as cut_repr
from typing import Any

from torch import Tensor

_MAX_ENTRIES = 3
"""Most entries of a mapping that are shown."""


def describe_fields(thing: Any) -> str:
    """Return `Class(field=value, ...)` of a dataclass, with tensors in short, without fields that are empty.

    >>> from fedsim.interfaces.findings import Membership
    >>> describe_fields(Membership(scores=Tensor([0.25, 0.5])))
    'Membership(scores=<float32 2, 0.25 to 0.5>)'
    """
    parts, mappings = list[str](), list[str]()
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        is_mapping = isinstance(value, Mapping)
        if field.repr and value is not None and not (is_mapping and not value):
            (mappings if is_mapping else parts).append(f"{field.name}={describe_value(value)}")
    return f"{type(thing).__name__}({', '.join(parts + mappings)})"


def describe_value(value: object) -> str:
    """Return a tensor's type, shape and range; of a mapping the first entries; of anything else a short `repr`."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, Mapping):
        entries = [f"{name}: {describe_value(value[name])}" for name in list(value)[:_MAX_ENTRIES]]
        if len(value) > _MAX_ENTRIES:
            entries.append(f"{len(value) - _MAX_ENTRIES} more")
        return f"{{{', '.join(entries)}}}"
    return cut_repr(value)


def _describe_tensor(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    text = f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
    if not tensor.numel():
        return f"<{text}>"
    if tensor.dtype.is_floating_point:
        low, high = tensor.min().item(), tensor.max().item()
        return f"<{text}, {low:.4g} to {high:.4g}>"
    numbers = tensor.flatten().tolist()  # torch has no minimum of uint64
    return f"<{text}, {min(numbers)} to {max(numbers)}>"
