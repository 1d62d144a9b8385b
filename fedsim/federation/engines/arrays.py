"""Flower arrays that hold NumPy values, in memory or on disk, and make bytes only when asked.

Flower's `Array` is the bytes of an .npy file, so each component that passes one on writes or parses
a file. That costs about as much as training a small network, and all replies of a round have to be
in memory until the strategy has seen the last of them.
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
from typing import Any, BinaryIO, Literal, TypeVar
from weakref import finalize

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.message.typeddict import TypedDict
from numpy.typing import NDArray
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.base.files import read_all, write_parts, write_remedy
from fedsim.recording.payloads import Payload, State, is_encoded

_RecordT = TypeVar("_RecordT", ArrayRecord, MetricRecord, ConfigRecord)
_DictT = TypeVar("_DictT", bound=TypedDict[Any, Any])
_NUMPY_TYPE = "numpy.ndarray"
_NPY_1_0 = b"\x93NUMPY\x01\x00"
"""Magic bytes and version at the start of an .npy file."""
_HEADER_START = 10
"""Bytes before the header: magic, version, and two for the header's length."""

with warnings.catch_warnings():
    # Once a process, torch warns that Flower's bytes are read-only. To keep it quiet at each array would take longer
    # than to read one.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(1), np.uint8))


class LazyArray(Array):
    """Flower Array that holds its values; `numpy` copies them, `data` makes Flower's bytes.

    Args:
        values: the values; nobody may write to them afterwards.
    """

    _values: NDArray[Any] | None
    _file_position: tuple[BinaryIO, int] | None

    def __init__(self, values: NDArray[Any]) -> None:
        # Not by assignment, which Flower watches to drop computed hashes; here there are none.
        fields = {"dtype": _dtype_name(values.dtype), "shape": values.shape, "stype": _NUMPY_TYPE}
        self.__dict__.update(fields, _values=values, _file_position=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {self.shape})"

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Bytes of an .npy file with the values."""
        buffer = io.BytesIO()
        np.save(buffer, self.view(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> NDArray[Any]:
        """Return a copy of the values, as any Array does."""
        return self.view().copy() if self._values is not None else self.view()

    @property
    def is_in_memory(self) -> bool:
        """True if the values are in memory, not in a file."""
        return self._values is not None

    def view(self) -> NDArray[Any]:
        """Return the values, without a copy where they are in memory."""
        if self._values is not None:
            return self._values
        assert self._file_position is not None
        file, start = self._file_position
        values = np.empty(self.shape, self.dtype)
        read_all(file, _memory_of(values), start)
        return values

    def deflate(self) -> bytes:
        """Serialise as a plain Array, because a SuperLink refuses classes it does not know."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce__(self) -> tuple[type[LazyArray], tuple[NDArray[Any]]]:
        """Pickle the values only, not the file that holds them or Flower's notes."""
        return LazyArray, (self.view(),)

    def move_to_file(self, file: BinaryIO) -> None:
        """Move the values to the end of `file`."""
        if self._values is not None:
            start = file.seek(0, os.SEEK_END)
            write_parts(file, [_memory_of(np.ascontiguousarray(self._values))], start)
            self._values, self._file_position = None, (file, start)


class ComputedArray(LazyArray):
    """Flower Array whose values are computed whenever they are read, and take no memory in between.

    Args:
        like: an array of the same type and shape.
    """

    _compute: Callable[[], NDArray[Any]]

    def __init__(self, like: NDArray[Any], compute: Callable[[], NDArray[Any]]) -> None:
        super().__init__(like)
        self.__dict__.update(_values=None, _compute=compute)

    def view(self) -> NDArray[Any]:
        """Compute and return the values."""
        return self._compute()


class ReplySpool:
    """Spool of the replies of one round: in memory up to a limit, then in an unnamed file.

    A reply that nobody refers to any more takes no room.

    Args:
        folder: the file's folder; None is the system's folder for temporary files.
        limit: bytes that may stay in memory.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._free_bytes = limit
        self._in_memory: dict[int, int] = {}  # bytes by id of the record, which is let go with it
        self._file: BinaryIO | None = None

    def store(self, record: ArrayRecord) -> None:
        """Store a reply: in memory while there is room, else in the file.

        Storing a record again changes nothing.
        """
        arrays = [array for array in record.values() if isinstance(array, LazyArray) and array.is_in_memory]
        size = sum(array.view().nbytes for array in arrays)
        if id(record) in self._in_memory or not size:
            return
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._in_memory[id(record)] = size
            finalize(record, self._release, id(record)).atexit = False
            return
        try:
            if self._file is None:  # open for as long as its arrays are in use
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            for array in arrays:
                array.move_to_file(self._file)
        except OSError as error:
            raise RunError(
                f"{self._folder}: the updates of this round cannot be written ({error.strerror}); "
                f"{write_remedy(error)} and resume the run, which keeps finished rounds"
            ) from error

    def _release(self, record_id: int) -> None:
        """Give back the room of a record that is gone."""
        self._free_bytes += self._in_memory.pop(record_id)


@cache  # str(dtype) is slow, and there are few types
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def make_record(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Make an ArrayRecord that shares the memory of `state`, which nobody may write to afterwards.

    >>> make_record({"weight": torch.zeros(2, 3)})["weight"].shape
    (2, 3)
    """
    # Given a dict, its constructor would turn each array into bytes.
    return fill_record(ArrayRecord(), {name: LazyArray(tensor.numpy()) for name, tensor in state.items()})


def fill_record(record: _DictT, values: Mapping[str, Any]) -> _DictT:
    """Put `values` of the right types into a new record of Flower, past its checks, and return it.

    The checks of its dictionaries take longer than all else that is done for a small reply.
    """
    vars(record)["_data"].update(values)
    return record


def array_bytes(content: RecordDict) -> int:
    """Return the bytes of all arrays in a message."""
    size = 0
    for record in content.array_records.values():
        size += sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in record.values())
    return size


class ReplyRecords(RecordDict):
    """Records of a reply, which are sorted by type quickly and do not refer to themselves.

    Flower's own take as long as training a small network, and keep arrays in memory until garbage
    is collected.

    Args:
        records: records of Flower by their names, which are not checked again.
    """

    def __init__(self, records: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord]) -> None:
        super().__init__()
        fill_record(self, records)

    @property
    def array_records(self) -> TypedDict[str, ArrayRecord]:
        """Return the records of arrays; what is put there is put here as well."""
        return _RecordsOfType(self, ArrayRecord)

    @property
    def metric_records(self) -> TypedDict[str, MetricRecord]:
        """Return the records of metrics; what is put there is put here as well."""
        return _RecordsOfType(self, MetricRecord)

    @property
    def config_records(self) -> TypedDict[str, ConfigRecord]:
        """Return the records of settings; what is put there is put here as well."""
        return _RecordsOfType(self, ConfigRecord)


class _RecordsOfType(TypedDict[str, _RecordT]):
    """Records of one type of a RecordDict, which has all changes as well."""

    def __init__(self, records: RecordDict, record_type: type[_RecordT]) -> None:
        super().__init__(_accept, _accept)
        vars(self).update(_records=records, _record_type=record_type)
        vars(self)["_data"].update({key: record for key, record in records.items() if isinstance(record, record_type)})

    def __setitem__(self, key: str, value: _RecordT) -> None:
        record_type = vars(self)["_record_type"]
        if not isinstance(value, record_type):
            raise TypeError(f"expected {record_type.__name__}, got {type(value).__name__}")
        vars(self)["_records"][key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del vars(self)["_records"][key]


def _accept(value: object) -> None:
    """Accept any key or value, which the RecordDict checks."""


def read_state(record: Mapping[str, Array]) -> State:
    """Return the tensors of `record`; they share memory with it, so nobody may write to them."""
    return {name: torch.from_numpy(view_values(array)) for name, array in record.items()}


def make_lazy(record: ArrayRecord) -> None:
    """Replace the arrays of `record` by lazy ones that share the memory of Flower's bytes."""
    for name, array in record.items():
        if not isinstance(array, LazyArray) and array.stype == _NUMPY_TYPE:
            record[name] = LazyArray(view_values(array))


def view_values(array: Array) -> NDArray[Any]:
    """Return the values as a view of the .npy bytes; `array.numpy()` would copy them."""
    if isinstance(array, LazyArray):
        return array.view()
    length = _HEADER_START + int.from_bytes(array.data[_HEADER_START - 2 : _HEADER_START], "little")
    if array.stype != _NUMPY_TYPE or not array.data.startswith(_NPY_1_0):
        return array.numpy()
    # Shape and type come from the bytes: the message's fields need not be true.
    shape, order, dtype = _parse_header(array.data[:length])
    values: NDArray[Any] = np.frombuffer(array.data, dtype, math.prod(shape), length)
    return values.reshape(shape, order=order)


def decode_lazily(record: ArrayRecord, before: State) -> ArrayRecord:
    """Decode the payload in `record` into the dense weights and gradients that a strategy reads.

    Values are decoded when they are read, from wherever the arrays of `record` are then. A record
    that is not encoded is returned as it is.
    """
    if not is_encoded(record, before):
        return record
    dense = ArrayRecord()
    for name, encoded in Payload.from_arrays(read_state(record), before).tensors.items():
        keys = list(Payload({name: encoded}).arrays())
        if not is_encoded(keys, before):
            dense[keys[0]] = record[keys[0]]
            continue
        arrays = {key: record[key] for key in keys}
        decode = partial(_decode_tensor, arrays, {name: before[name]})
        key = f"gradient/{name}" if encoded[0] == "gradient" else name
        dense[key] = ComputedArray(before[name].numpy(), decode)
    return dense


def _decode_tensor(arrays: Mapping[str, Array], before: State) -> NDArray[Any]:
    (tensor,) = Payload.from_arrays(read_state(arrays), before).decode(before).values()
    return tensor.numpy()


@lru_cache(maxsize=1024)  # NumPy parses a header as Python source, which is slow
def _parse_header(start: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """Return shape, order and type of the array in an .npy file, version 1.0."""
    file = io.BytesIO(start)
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, "F" if is_fortran else "C", dtype


def _memory_of(values: NDArray[Any]) -> memoryview:
    """Return the bytes of `values`, which are in C order, without a copy."""
    return values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
