"""Measurements that several findings share, found again by the contents of what they were computed from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

ValueT = TypeVar("ValueT")
_MAX_ENTRIES = 4096


class MeasurementCache:
    """Measurements of one evaluation, the last few thousand by default.

    Attacks on one victim are scored beside the same guesses, which cost more to measure than their claims do. What is
    the same is decided by content, as guesses may follow from what an attack claims.
    """

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[tuple[object, ...], object] = OrderedDict()

    def find(self, compute: Callable[[], ValueT], *inputs: Tensor | str | float | None) -> ValueT:
        """Return what `compute` returned for the same inputs, or call it.

        Args:
            compute: gives the measurement; what it returns must not be changed.
            inputs: all that it depends on, and that differs from finding to finding; a name of the measurement first.
        """
        return self.find_several(lambda missing: [compute()], [inputs])[0]

    def find_several(
        self,
        compute: Callable[[list[int]], Sequence[ValueT]],
        inputs: Sequence[Sequence[Tensor | str | float | None]],
    ) -> list[ValueT]:
        """Return several measurements, of which those that are not known are computed together."""
        keys = [tuple(_hash_content(part) if isinstance(part, Tensor) else part for part in parts) for parts in inputs]
        missing = [position for position, key in enumerate(keys) if key not in self._values]
        values = {key: self._values[key] for key in keys if key in self._values}
        if missing:
            for position, value in zip(missing, compute(missing), strict=True):
                values[keys[position]] = self._values[keys[position]] = value
            while len(self._values) > self._max_entries:
                self._values.popitem(last=False)
        return [values[key] for key in keys]  # type: ignore[misc]  # a name of a measurement has one type of value


def _hash_content(tensor: Tensor) -> tuple[object, ...]:
    content = tensor.detach().cpu().contiguous().numpy().tobytes()
    return tensor.shape, tensor.dtype, hashlib.sha256(content).digest()
