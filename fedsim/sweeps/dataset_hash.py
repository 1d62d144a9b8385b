"""The hash of a data set that is not read from files."""

from __future__ import annotations

import hashlib
from dataclasses import fields

import torch

from fedsim.data import Dataset


def hash_dataset(dataset: Dataset) -> str:
    """Return the SHA-256 of all examples and of the other fields of a data set."""
    parts = {"train": dataset.train, "test": dataset.test}
    names = [field.name for field in fields(dataset) if field.name not in parts]
    values = [(name, getattr(dataset, name)) for name in names]
    digest = hashlib.sha256(repr(values).encode())
    for part in parts.values():
        digest.update(repr(part.scale).encode())
        for tensor in (part.raw, part.labels, part.groups):
            digest.update(b"none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor is not None and tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
