"""Reading arrays from untrusted bytes: files of NumPy, PyTorch, safetensors and Flax.

With trust, pickles of arrays are read as well.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.torch import load

from fedsim.base.errors import TrustError
from fedsim.data.checks import memory_complaint

_ALLOWED_GLOBALS = {
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}
"""Functions and classes, by module and name, that a pickle of arrays may import."""
# Flax writes MessagePack with types of its own: an array is its shape, dtype and bytes.
_FLAX_ARRAY, _FLAX_SCALAR = 1, 3
_FLAX_CHUNKS = "__msgpack_chunked_array__"


class ForeignObjectError(ValueError):
    """Bytes hold objects or code, and not only arrays; nothing of them was run."""


def read_arrays(content: bytes, *, trust: bool) -> Any:
    """Read an array, or a list or dict of arrays.

    Args:
        content: a file of NumPy (`.npy`, `.npz`), PyTorch, safetensors or Flax (MessagePack), or a
            pickle.
        trust: read a pickle as well; it may import only the names that arrays need.

    Raises:
        TrustError: it is a pickle, or of an unknown format, and `trust` is false.
        ForeignObjectError: a file of NumPy or PyTorch holds more than arrays.
        Exception: anything that these libraries raise for bytes that hold no arrays.
    """
    if not content:
        raise EOFError("it is empty")
    # The first bytes tell the format.
    if content[:6] == b"\x93NUMPY":
        return _load_numpy(content)
    if content[:2] == b"PK":
        members = zipfile.ZipFile(io.BytesIO(content)).infolist()
        # A few bytes may be packed zeros without end.
        if complaint := memory_complaint(sum(member.file_size for member in members)):
            raise ValueError(f"its arrays {complaint}")
        if any(member.filename.endswith("/data.pkl") for member in members):
            return _load_torch(content)
        return _load_numpy(content)
    if content[8:9] == b"{":  # after the length of its header
        return load(content)
    if _begins_with_map(content):
        return msgpack.unpackb(content, ext_hook=_read_flax_value, object_hook=_refuse_chunks, strict_map_key=False)
    if not trust:
        raise TrustError("it is a pickle or bytes of another kind, which are read with --trust alone")
    return _ArrayUnpickler(io.BytesIO(content)).load()


def _load_numpy(content: bytes) -> Any:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ForeignObjectError("it holds an array of objects, which is a pickle") from error


def _load_torch(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:  # whose text advises to run the code
        raise ForeignObjectError("it holds more than tensors, such as objects or code, or is damaged") from error


def _begins_with_map(content: bytes) -> bool:
    """Return whether the bytes begin as a MessagePack map does, which no pickle begins with."""
    return bool(content) and (0x81 <= content[0] <= 0x8F or content[0] in (0xDE, 0xDF))


def _read_flax_value(code: int, content: bytes) -> Any:
    if code not in (_FLAX_ARRAY, _FLAX_SCALAR):
        raise ValueError(f"it holds a MessagePack extension of type {code}, which is not an array")
    shape, dtype, values = msgpack.unpackb(content, raw=True)
    if dtype == b"bfloat16":  # of which NumPy knows nothing
        return torch.frombuffer(bytearray(values), dtype=torch.bfloat16).reshape(tuple(shape))
    return np.frombuffer(values, dtype=np.dtype(dtype.decode())).reshape(shape)


def _refuse_chunks(values: dict[Any, Any]) -> dict[Any, Any]:
    if _FLAX_CHUNKS in values:
        raise ValueError("it holds an array of over 1 GB in chunks; write it with safetensors")
    return values


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse to import anything that arrays do not need."""
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)
