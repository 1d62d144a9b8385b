"""The memory of a defense, in the state that a client's node keeps for it (Flower's `Context.state`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedsim.defense import Defense, Memory, kind, remembers
from fedsim.engines.arrays import record_of, state_in
from fedsim.errors import RunError

_DTYPES = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64,
    )
)  # fmt: skip
"""What NumPy and a checkpoint can hold."""
_LONGEST = 200
"""Characters of a name."""


@contextmanager
def memory_of(defense: Defense, key: str, state: RecordDict) -> Iterator[Memory | None]:
    """Copies of what `defense` kept under `key` in `state`; on leaving, what the mapping then holds is kept instead.

    None for a defense that asks for no memory. Whatever is raised within leaves `state` as it was.

    Raises:
        RunError: something else than tensors by name is to be kept.
    """
    if not remembers(defense):
        yield None
        return
    kept: Any = state.get(key)  # `state.array_records` would refer to itself, and so be freed late
    memory = {name: tensor.clone() for name, tensor in state_in(kept).items()} if kept is not None else {}
    yield memory
    for name, value in memory.items():
        _check(name, value, type(defense).__name__)
    if memory:
        state[key] = record_of({name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()})
    elif kept is not None:
        del state[key]


@contextmanager
def as_it_was_after_failure(state: RecordDict) -> Iterator[None]:
    """Put `state` back as it was where something is raised within: a client that fails keeps what it had."""
    before = dict(state)
    try:
        yield
    except BaseException:
        state.clear()
        state.update(before)
        raise


def _check(name: object, value: object, where: str) -> None:
    """Raise RunError for what cannot be carried to the next round."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _LONGEST:
        raise RunError(
            f"{where}: expected names of 1 to {_LONGEST} printable characters in its memory, got {str(name)[:40]!r}"
        )
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _DTYPES:
        raise RunError(f"{where}: expected '{name}' in its memory as a dense tensor of real numbers, got {kind(value)}")
