"""Memory of a defense between rounds, in its client's state (Flower's `Context.state`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.interfaces.defense import Defense, Memory, describe_value, uses_memory

_DTYPES = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64,
    )
)  # fmt: skip
"""Types that NumPy and a checkpoint can hold."""
_MAX_NAME_LENGTH = 200


@contextmanager
def open_memory(defense: Defense, key: str, state: RecordDict) -> Iterator[Memory | None]:
    """Yield a copy of the memory of `defense` under `key` in `state`, and store it on leaving.

    It is None for a defense that asks for no memory. An error within leaves `state` as it was.

    Raises:
        RunError: the memory holds something else than tensors by name.
    """
    if not uses_memory(defense):
        yield None
        return
    # `state.array_records` would refer to itself, and so be freed late.
    record: Any = state.get(key)
    memory = {name: tensor.clone() for name, tensor in read_state(record).items()} if record is not None else {}
    yield memory
    for name, value in memory.items():
        _check_entry(name, value, type(defense).__name__)
    if memory:
        state[key] = make_record({name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()})
    elif record is not None:
        del state[key]


@contextmanager
def restore_on_failure(state: RecordDict) -> Iterator[None]:
    """Restore `state` if an error is raised within: a client that fails keeps the state it had."""
    before = dict(state)
    try:
        yield
    except BaseException:
        state.clear()
        state.update(before)
        raise


def _check_entry(name: object, value: object, where: str) -> None:
    """Raise RunError for an entry that cannot be carried to the next round."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_LENGTH:
        raise RunError(
            f"{where}: expected names of 1 to {_MAX_NAME_LENGTH} printable characters in its memory, "
            f"got {str(name)[:40]!r}"
        )
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _DTYPES:
        raise RunError(
            f"{where}: expected '{name}' in its memory as a dense tensor of real numbers, got {describe_value(value)}"
        )
