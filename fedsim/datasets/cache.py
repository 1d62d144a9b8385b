"""A parsed data set, kept as one safetensors file that is mapped into memory.

Text and compressed files take seconds to parse; the parsed tensors take none to map, and processes
on one machine share their pages. Writing into a mapped tensor changes neither the file nor another
process. The file's name follows from the settings and from paths and contents of all source files, so
a changed source is parsed anew. It holds a SHA-256 of its tensors, which each process checks once.
The folder is FEDSIM_CACHE, by default `fedsim` in XDG_CACHE_HOME or `~/.cache`; it may be deleted at
any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.content_hashes import hash_of_files
from fedsim.datasets import Column, Dataset, DatasetPlugin, Examples
from fedsim.files import cache_folder as cache_folder

log = logging.getLogger(__name__)

_FORMAT = 3
"""Raise it when a parser changes what it makes of the same file."""

_checked: set[tuple[int, int, int]] = set()
"""The files that this process has read through, by inode, time and size."""

_looking: ContextVar[bool] = ContextVar("looking", default=False)
"""Whether somebody asks for the files of a data set, and not for the data."""

_UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""What safetensors, and torch on mapping for it, raise of files; also where another process removes one."""


class _Found(Exception):
    """Ends the loading of a data set once its files are found.

    Attributes:
        files: all of them.
    """

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self.files = files


def files_of(plugin: DatasetPlugin, folder: Path | None) -> list[Path]:
    """The files that a data set of fedsim's own would read; they are there, and are not read.

    One that comes in no file, or in no file of the data folder, is loaded.

    Raises:
        DataError: one of them is missing, or a setting that names it is.
    """
    before = _looking.set(True)
    try:
        plugin.load(folder)
    except _Found as found:
        return found.files
    finally:
        _looking.reset(before)
    return []


def cached(plugin: Any, sources: Iterable[Path], parse: Callable[[], Dataset]) -> Dataset:
    """What `parse` returned for the same plug-in settings and sources, or what it returns now.

    Several processes may ask at once: each parses, whole files replace each other.

    Args:
        plugin: the data set plug-in, a dataclass; its class and settings are part of the key.
        sources: every file that `parse` reads; they exist.
    """
    if _looking.get():
        raise _Found(list(sources))
    path = cache_folder() / "datasets" / f"{_key(plugin, sources)}.safetensors"
    if path.is_file():
        try:
            return _read(path)
        except (*_UNREADABLE, KeyError, TypeError, ValueError) as error:
            log.warning("%s: is not readable (%s); parsing the data anew", path, error)
    dataset = parse()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".") as own:  # a name that no other process has
            temporary = Path(own) / path.name
            _write(dataset, temporary)
            mapped = _read(temporary)  # before others may remove it; its pages are shared with whoever reads it later
            temporary.replace(path)
    except _UNREADABLE as error:
        log.warning("%s: the parsed data are not kept (%s); set FEDSIM_CACHE to a folder with room", path, error)
        return dataset
    return mapped


def _key(plugin: Any, sources: Iterable[Path]) -> str:
    text = repr((_FORMAT, type(plugin).__module__, repr(plugin), hash_of_files(path.resolve() for path in sources)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(dataset: Dataset, path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for item in dataclasses.fields(dataset):
        value = getattr(dataset, item.name)
        if isinstance(value, Examples):
            parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
            tensors |= {f"{item.name}/{k}": v.contiguous() for k, v in parts.items() if isinstance(v, Tensor)}
            about[item.name] = {k: v for k, v in parts.items() if not isinstance(v, Tensor)}
        elif item.name == "columns":
            about[item.name] = [dataclasses.asdict(column) for column in value]
        else:
            about[item.name] = value
    text = json.dumps(about)
    save_file(tensors, path, metadata={"fedsim": text, "sha256": _digest(text, tensors)})


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    whole = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        whole.update(f"{name}:{tensors[name].dtype}:{tuple(tensors[name].shape)};".encode())
        whole.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return whole.hexdigest()


def _read(path: Path) -> Dataset:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text, digest = file.metadata()["fedsim"], file.metadata()["sha256"]
    stat = path.stat()
    file_as_it_is = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if file_as_it_is not in _checked and _digest(text, tensors) != digest:
        raise ValueError("its bytes are not those that were written")
    _checked.add(file_as_it_is)
    about: dict[str, Any] = json.loads(text)
    for name, tensor in tensors.items():
        part, _, item = name.partition("/")
        about[part][item] = tensor
    for part in ("train", "test"):
        about[part] = Examples(**about[part])
    about["columns"] = [Column(**{**column, "categories": tuple(column["categories"])}) for column in about["columns"]]
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in about.items()}
    return Dataset(**fields)
