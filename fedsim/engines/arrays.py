"""Flower arrays that stay as they are, in memory or on disk, until somebody asks for bytes.

Flower's `Array` is the bytes of an .npy file: each hand that passes one on writes or parses a file.
That costs about as much as training a small network does, and all replies of a round have to be in
memory until the strategy has seen the last of them.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import RunError
from fedsim.files import write_all
from fedsim.wire.payloads import Payload, State, is_encoded

_NUMPY = "numpy.ndarray"
_NPY_1_0, _BEFORE_HEADER = b"\x93NUMPY\x01\x00", 10  # magic and version; with the length of the header, bytes


class Held(Array):
    """An Array that holds its values themselves; `numpy` copies them, `data` makes Flower's bytes.

    Args:
        values: what it holds; nobody may write to them afterwards.
    """

    _values: NDArray[Any] | None
    _parked: tuple[BinaryIO, int] | None

    def __init__(self, values: NDArray[Any]) -> None:
        # Flower watches assignments, to forget hashes that it has computed; here there are none.
        self.__dict__.update(dtype=_name(values.dtype), shape=values.shape, stype=_NUMPY, _values=values, _parked=None)

    def __repr__(self) -> str:
        return f"Held({self.dtype}, {self.shape})"

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of an .npy file."""
        buffer = io.BytesIO()
        np.save(buffer, self.view(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> NDArray[Any]:
        """A copy of the values, as from any Array."""
        return self.view().copy() if self._values is not None else self.view()

    @property
    def in_memory(self) -> bool:
        """Whether the values have not been parked."""
        return self._values is not None

    def view(self) -> NDArray[Any]:
        """The values, without a copy where they are in memory."""
        if self._values is not None:
            return self._values
        assert self._parked is not None
        file, start = self._parked
        values = np.empty(self.shape, self.dtype)
        left = _bytes(values)
        while left:
            count = os.preadv(file.fileno(), [left], start)
            start, left = start + count, left[count:]
        return values

    def deflate(self) -> bytes:
        """What goes to a SuperLink: that of a plain Array, because it refuses objects whose class it does not know."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce__(self) -> tuple[type[Held], tuple[NDArray[Any]]]:
        """Values are sent; the file that holds them and what Flower notes about them are not."""
        return Held, (self.view(),)

    def park(self, file: BinaryIO) -> None:
        """Move the values to the end of `file`."""
        if self._values is not None:
            start = file.seek(0, os.SEEK_END)
            write_all(file, _bytes(np.ascontiguousarray(self._values)))
            self._values, self._parked = None, (file, start)


class Computed(Held):
    """An Array whose values are computed whenever somebody asks, so that they take no room in between.

    Args:
        like: has its type and shape.
        compute: makes the values.
    """

    _compute: Callable[[], NDArray[Any]]

    def __init__(self, like: NDArray[Any], compute: Callable[[], NDArray[Any]]) -> None:
        super().__init__(like)
        self.__dict__.update(_values=None, _compute=compute)

    def view(self) -> NDArray[Any]:
        """The values, computed anew."""
        return self._compute()


class Parking:
    """Where the replies of one round wait for the strategy: in memory up to a limit, then in a file without a name.

    Args:
        folder: holds the file; None is the system's folder for temporary files.
        limit: bytes that may stay in memory.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._left = limit
        self._staying: dict[int, ArrayRecord] = {}  # kept, so that nobody else gets their ids
        self._file: BinaryIO | None = None

    def take(self, record: ArrayRecord) -> None:
        """Move the arrays of `record` to disk, unless there is room for them in memory; asking twice is asking once.

        Raises:
            RunError: the file cannot be written.
        """
        held = [array for array in record.values() if isinstance(array, Held) and array.in_memory]
        size = sum(array.view().nbytes for array in held)
        if id(record) in self._staying or not size:
            return
        if size <= self._left:
            self._left -= size
            self._staying[id(record)] = record
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - lives as its arrays do
            for array in held:
                array.park(self._file)
        except OSError as error:
            raise RunError(
                f"{self._folder}: no room for the updates of this round ({error.strerror}); "
                "the rounds before it are kept, make room and resume the run"
            ) from error


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def record_of(state: Mapping[str, Tensor]) -> ArrayRecord:
    """An ArrayRecord that shares the memory of `state`, which nobody may write to afterwards."""
    record = ArrayRecord()  # given a dict, its constructor would turn each array into bytes
    for name, tensor in state.items():
        record[name] = Held(tensor.numpy())
    return record


def state_in(record: Mapping[str, Array]) -> State:
    """The tensors of `record`; they share memory with it, so nobody may write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(_view(array)) for name, array in record.items()}


def hold(record: ArrayRecord) -> None:
    """Make the arrays of `record` Held ones, sharing the memory of Flower's bytes."""
    for name, array in record.items():
        if not isinstance(array, Held) and array.stype == _NUMPY:
            record[name] = Held(_view(array))


def _view(array: Array) -> NDArray[Any]:
    """What `array.numpy()` returns, without the copy: a view of its .npy bytes."""
    if isinstance(array, Held):
        return array.view()
    length = _BEFORE_HEADER + int.from_bytes(array.data[_BEFORE_HEADER - 2 : _BEFORE_HEADER], "little")
    if array.stype != _NUMPY or not array.data.startswith(_NPY_1_0):
        return array.numpy()
    # Shape and type as the bytes give them; what the sender writes in the message's fields need not be true.
    shape, order, dtype = _header(array.data[:length])
    values: NDArray[Any] = np.frombuffer(array.data, dtype, math.prod(shape), length)
    return values.reshape(shape, order=order)


def as_plain(record: ArrayRecord, before: State) -> ArrayRecord:
    """What a strategy reads of the payload in `record`: dense weights and gradients; `record` itself if it holds these.

    Values are decoded when they are read, from where the arrays of `record` are then.

    Args:
        before: w_t.

    Raises:
        PayloadError: the arrays are no payload for these tensors.
    """
    if not is_encoded(record, before):
        return record
    plain = ArrayRecord()
    for name, sent in Payload.from_arrays(state_in(record), before).tensors.items():
        keys = list(Payload({name: sent}).arrays())
        if not is_encoded(keys, before):
            plain[keys[0]] = record[keys[0]]
            continue
        decode = partial(_decoded, {key: record[key] for key in keys}, {name: before[name]})
        plain[f"gradient/{name}" if sent[0] == "gradient" else name] = Computed(before[name].numpy(), decode)
    return plain


def _decoded(arrays: Mapping[str, Array], before: State) -> NDArray[Any]:
    """The one tensor that these arrays are sent for, as a strategy reads it."""
    (tensor,) = Payload.from_arrays(state_in(arrays), before).decoded(before).values()
    return tensor.numpy()


@lru_cache(maxsize=1024)
def _header(start: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """What the start of an .npy file, version 1.0, says of its array; NumPy parses it as Python source."""
    file = io.BytesIO(start)
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, "F" if is_fortran else "C", dtype


def _bytes(values: NDArray[Any]) -> memoryview:
    """The memory of `values`, which are in C order."""
    return values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
