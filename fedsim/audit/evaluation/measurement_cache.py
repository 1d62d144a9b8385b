"""Measurements that several findings share, found again by the contents of what they were computed from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

ValueT = TypeVar("ValueT")
_MAX_ENTRIES = 4096


class MeasurementCache:
    """Measurements of one evaluation, the last few thousand.

    Attacks on one victim are scored beside the same guesses, which cost more to measure than their claims do. What is
    the same is decided by content, as guesses may follow from what an attack claims.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[object, ...], object] = OrderedDict()

    def find(self, compute: Callable[[], ValueT], *inputs: Tensor | str | float | None) -> ValueT:
        """Return what `compute` returned for the same inputs, or call it.

        Args:
            compute: gives the measurement; nobody may change what it returns.
            inputs: all that it depends on, and that differs from finding to finding; a name of the measurement first.
        """
        key = tuple(_hash_content(part) if isinstance(part, Tensor) else part for part in inputs)
        if key not in self._values:
            self._values[key] = compute()
            if len(self._values) > _MAX_ENTRIES:
                self._values.popitem(last=False)
        return self._values[key]  # type: ignore[return-value]  # a name of a measurement has one type of value


def _hash_content(tensor: Tensor) -> tuple[object, ...]:
    content = tensor.detach().cpu().contiguous().numpy().tobytes()
    return tensor.shape, tensor.dtype, hashlib.sha256(content).digest()
