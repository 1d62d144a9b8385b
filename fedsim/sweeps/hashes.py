"""Hashes of files, each read once: cells of a federation share the files of its recording."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path

import torch

from fedsim.datasets import Dataset
from fedsim.files import hash_file

_known: dict[tuple[int, int, int, int], str] = {}
"""By device, inode, time of change and size."""


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    about = path.stat()
    key = about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size
    if key not in _known:
        _known[key] = hash_file(path)
    return _known[key]


def hash_of_folder(path: Path) -> str:
    """A hash of the names, sizes and times of change of all files below a folder, which may be too many to be read.

    Raises:
        OSError: it cannot be read.
    """
    files = sorted(Path(parent) / name for parent, _, names in os.walk(path) for name in names)
    stamps = [(file.relative_to(path).as_posix(), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
    return hash_of_parts(stamps)


def hash_of_dataset(dataset: Dataset) -> str:
    """SHA-256 of all examples, and of what is known of them."""
    parts = {"train": dataset.train, "test": dataset.test}
    known = [(item.name, getattr(dataset, item.name)) for item in fields(dataset) if item.name not in parts]
    found = hashlib.sha256(repr(known).encode())
    for part in parts.values():
        found.update(repr(part.scale).encode())
        for tensor in (part.raw, part.labels, part.groups):
            found.update(b"none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor is not None and tensor.numel():
                found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def hash_of_parts(parts: object) -> str:
    """SHA-256 of what JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
