"""Cache of parsed data sets: one safetensors file each, mapped into memory.

Text and compressed files take seconds to parse. The parsed tensors are mapped at once, and
processes on one machine share their pages. Writing into a mapped tensor changes neither the file
nor another process. The file's name follows from the settings and from paths and contents of all
source files, so a changed source is parsed again. The file holds a SHA-256 of its tensors, which
each process checks once. The folder is FEDSIM_CACHE, by default `fedsim` in XDG_CACHE_HOME or
`~/.cache`; it may be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import stat
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.base.content_hashes import hash_files
from fedsim.base.files import cache_folder as cache_folder
from fedsim.base.files import replace_atomically
from fedsim.data import Column, Dataset, DatasetPlugin, Examples

log = logging.getLogger(__name__)

_CACHE_VERSION = 9
"""Raise it when a parser makes something else of the same file."""

_verified_files: set[tuple[int, int, int]] = set()
"""The files whose checksum this process has verified, by inode, time and size."""

_listing_sources: ContextVar[bool] = ContextVar("listing_sources", default=False)
"""Whether `find_source_files` is running, which needs the files of a data set, not its data."""

_FILE_ERRORS = (OSError, SafetensorError, RuntimeError)
"""Errors of safetensors, and of torch mapping for it; also where another process removes a file."""


class _SourcesFound(Exception):
    """Ends the loading of a data set once its files are found."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self.files = files


def find_source_files(plugin: DatasetPlugin, folder: Path | None) -> list[Path]:
    """Return the files that a built-in data set would read, without reading them; they exist.

    A data set that has no file in the data folder is loaded.
    """
    token = _listing_sources.set(True)
    try:
        plugin.load(folder)
    except _SourcesFound as found:
        return found.files
    finally:
        _listing_sources.reset(token)
    return []


def load_cached(plugin: Any, sources: Iterable[Path], parse: Callable[[], Dataset]) -> Dataset:
    """Load a data set from the cache, or parse it and add it to the cache.

    Its remarks are warned of each time.
    Several processes may do this at once: each parses, and complete files replace each other.

    Args:
        plugin: the data set plug-in, a dataclass; its class and settings are part of the key.
        sources: every file that `parse` reads; they exist.
    """
    if _listing_sources.get():
        raise _SourcesFound(list(sources))
    path = cache_folder() / "datasets" / f"{_cache_key(plugin, sources)}.safetensors"
    dataset = _read_or_parse(path, sources, parse)
    for remark in dataset.remarks:
        log.warning("data: %s", remark)
    return dataset


def _read_or_parse(path: Path, sources: Iterable[Path], parse: Callable[[], Dataset]) -> Dataset:
    if path.is_file():
        try:
            return _read_dataset(path)
        except (*_FILE_ERRORS, KeyError, TypeError, ValueError) as error:
            log.warning("%s: is not readable (%s); parsing the data anew", path, error)
    dataset = parse()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The folder's name belongs to this process alone.
        with TemporaryDirectory(dir=path.parent, prefix=".") as private_folder:
            temporary = Path(private_folder) / path.name
            with replace_atomically(temporary) as unfinished:
                _write_dataset(dataset, unfinished)
            if not _may_everybody_read(sources):
                temporary.chmod(0o600)
            # Mapped before others may remove it; later readers share the same pages.
            mapped = _read_dataset(temporary)
            temporary.replace(path)
    except _FILE_ERRORS as error:
        log.warning("%s: the parsed data are not kept (%s); set FEDSIM_CACHE to a folder with room", path, error)
        return dataset
    return mapped


def _may_everybody_read(sources: Iterable[Path]) -> bool:
    """Return whether permissions keep no user of the machine from the files and the folders that they are in."""
    folders: set[Path] = set()
    for source in sources:
        path = source.resolve()
        if not path.stat().st_mode & stat.S_IROTH:
            return False
        folders.update(path.parents)
    shared_mode = stat.S_IXOTH
    for folder in folders:
        shared_mode &= folder.stat().st_mode
    return shared_mode != 0


def _cache_key(plugin: Any, sources: Iterable[Path]) -> str:
    sources_hash = hash_files(path.resolve() for path in sources)
    text = repr((_CACHE_VERSION, type(plugin).__module__, repr(plugin), sources_hash))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write_dataset(dataset: Dataset, path: Path) -> None:
    """Write tensors as such, and all other fields as JSON in the file's metadata."""
    tensors: dict[str, Tensor] = {}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(dataset):
        value = getattr(dataset, field.name)
        if isinstance(value, Examples):
            fields[field.name] = {}
            for part in dataclasses.fields(value):
                item = getattr(value, part.name)
                if isinstance(item, Tensor):
                    tensors[f"{field.name}/{part.name}"] = item.contiguous()
                else:
                    fields[field.name][part.name] = item
        elif field.name == "columns":
            fields[field.name] = [dataclasses.asdict(column) for column in value]
        else:
            fields[field.name] = value
    text = json.dumps(fields)
    save_file(tensors, path, metadata={"fedsim": text, "sha256": _compute_digest(text, tensors)})


def _compute_digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        digest.update(f"{name}:{tensors[name].dtype}:{tuple(tensors[name].shape)};".encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _read_dataset(path: Path) -> Dataset:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text, digest = file.metadata()["fedsim"], file.metadata()["sha256"]

    # Verify the checksum, once for each version of the file.
    stat = path.stat()
    file_version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if file_version not in _verified_files and _compute_digest(text, tensors) != digest:
        raise ValueError("its bytes are not those that were written")
    _verified_files.add(file_version)

    # Put tensors and JSON together; JSON has lists where the fields are tuples.
    fields: dict[str, Any] = json.loads(text)
    for name, tensor in tensors.items():
        part, _, item = name.partition("/")
        fields[part][item] = tensor
    for part in ("train", "test"):
        fields[part] = Examples(**fields[part])
    columns = []
    for column in fields["columns"]:
        columns.append(Column(**{**column, "categories": tuple(column["categories"])}))
    fields["columns"] = columns
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return Dataset(**fields)
