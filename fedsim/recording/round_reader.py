"""Reader of the states in round files, which are verified as they are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedsim.recording.header import RECORDABLE, damage_error, hash_state
from fedsim.recording.payloads import State

Index = dict[str, list[tuple[int, str, str]]]
"""Key prefix, such as `client/3`, to the position, name and key of each of its tensors."""
_BYTES_OF_TYPE = {name: dtype.itemsize for dtype, name in RECORDABLE.items()}
"""Name of a type in a file to the bytes of one number."""


class RoundReader:
    """Reads states, and holds the file and the broadcast that were read last.

    A file is opened anew where it was replaced. Errors name the file and say that it is damaged.
    """

    def __init__(self) -> None:
        # Signature, open file and index of the file that was read last.
        self._last_file: tuple[tuple[int, ...], Any, Index] | None = None
        self._last_broadcast: tuple[tuple[Path, str], State] | None = None
        self._verified: set[tuple[Path, str]] = set()

    def read_index(self, path: Path) -> Index:
        """Return the tensors that a file has, by the prefixes of their states."""
        try:
            return self._open_file(path)[1]
        except (OSError, SafetensorError, ValueError) as error:
            raise damage_error(path, str(error)) from error

    def read_state(self, path: Path, prefix: str, expected: str) -> State:
        """Return the state under a prefix, whose SHA-256 is the expected one."""
        key = (path, prefix)
        # Nearly all updates of a round share the broadcast; each gets a copy, which it may change.
        if self._last_broadcast is not None and self._last_broadcast[0] == key:
            return _copy_state(self._last_broadcast[1])
        try:
            file, index = self._open_file(path)
            state = {name: file.get_tensor(tensor_key) for _, name, tensor_key in index.get(prefix, [])}
            digest = expected if key in self._verified else hash_state(state)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damage_error(path, str(error)) from error
        if digest != expected:
            raise damage_error(path, f"the bytes of {prefix} are not those that were recorded")
        if prefix.startswith("broadcast/"):
            self._verified.add(key)
            self._last_broadcast = key, _copy_state(state)
        return state

    def _open_file(self, path: Path) -> tuple[Any, Index]:
        """Return a file and its index, cached because parsing thousands of names takes long."""
        status = path.stat()
        signature = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._last_file is None or self._last_file[0] != signature:
            self._last_file = None
            file: Any = safe_open(path, framework="pt")
            self._last_file = signature, file, _build_index(file.keys())
        return self._last_file[1:]


def count_bytes(path: Path, prefixes: Collection[str]) -> dict[str, int]:
    """Return the bytes of the arrays under each of the prefixes; no array is read."""
    sizes = dict.fromkeys(prefixes, 0)
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                prefix = "/".join(key.split("/", 2)[:2])
                if prefix in sizes:
                    array = file.get_slice(key)
                    sizes[prefix] += math.prod(array.get_shape()) * _BYTES_OF_TYPE[array.get_dtype()]
    except (OSError, SafetensorError, KeyError) as error:
        raise damage_error(path, str(error)) from error
    return sizes


def _build_index(keys: Iterable[str]) -> Index:
    """Group the keys of a round's file by prefix; each tensor with its position, name and key."""
    index: Index = {}
    for key in keys:
        kind, _, rest = key.partition("/")
        owner, _, rest = rest.partition("/")
        position, slash, name = rest.partition("/")
        if slash:  # keys of padding have fewer parts
            index.setdefault(f"{kind}/{owner}", []).append((int(position), name, key))
    return {prefix: sorted(entries) for prefix, entries in index.items()}


def _copy_state(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
