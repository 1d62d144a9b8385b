"""Arrays out of bytes that somebody sent: files of NumPy and PyTorch, which run no code, and with trust pickles."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import numpy as np
import torch

from fedsim.errors import TrustError

_HARMLESS = {
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in (
        ("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"),
    )),
}  # fmt: skip
"""What a pickle of arrays needs."""


def arrays_in(content: bytes, *, trust: bool) -> Any:
    """An array, or a list or dict of them.

    Args:
        trust: read a pickle as well; nothing is imported for it but what arrays need.

    Raises:
        TrustError: it is a pickle, or nothing that is known, and there is no trust.
        Exception: whatever NumPy, PyTorch or a pickle raise of bytes that hold no arrays.
    """
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
    return _Arrays(file).load()


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return super().find_class(module, name)
