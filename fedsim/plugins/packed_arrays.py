"""Reading arrays from untrusted bytes: NumPy and PyTorch files, and with trust pickles."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import numpy as np
import torch

from fedsim.base.errors import TrustError

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


def read_arrays(content: bytes, *, trust: bool) -> Any:
    """Read an array, or a list or dict of arrays.

    Args:
        content: a file of NumPy (`.npy`, `.npz`) or PyTorch, or a pickle.
        trust: read a pickle as well; it may import only the names that arrays need.

    Raises:
        TrustError: it is a pickle, or of an unknown format, and `trust` is false.
        Exception: anything that NumPy, PyTorch or pickle raise for bytes that hold no arrays.
    """
    # The first bytes tell the format.
    file = io.BytesIO(content)
    if content[:6] == b"\x93NUMPY":
        return np.load(file, allow_pickle=False)
    if content[:2] == b"PK":
        names = zipfile.ZipFile(file).namelist()
        if any(name.endswith("/data.pkl") for name in names):
            return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        return dict(np.load(io.BytesIO(content), allow_pickle=False))
    if not trust:
        raise TrustError("it is a pickle or bytes of another kind, which are read with --trust alone")
    return _ArrayUnpickler(file).load()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse to import anything that arrays do not need."""
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)
