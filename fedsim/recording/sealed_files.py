"""Sealed files: arrays and a JSON header with a SHA-256 over both, such as checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsim.base.errors import RunError
from fedsim.base.files import check_readable, parse_json, replace_atomically, write_remedy

Arrays = dict[str, NDArray[Any]]


def write_sealed_file(
    path: Path,
    header: Mapping[str, Any],
    arrays: Arrays,
    *,
    durable: bool = False,
    announce: Callable[[str], None] | None = None,
) -> str:
    """Write a sealed file in one step, and return the SHA-256 that it holds.

    Args:
        durable: wait until the file is on the disk.
        announce: called with the SHA-256 before the file is written.
    """
    text = json.dumps(header)
    digest = _hash_content(text, arrays)
    if announce is not None:
        announce(digest)
    try:
        with replace_atomically(path, durable=durable) as temporary:
            save_file(arrays, temporary, metadata={"fedsim": json.dumps({"header": text, "sha256": digest})})
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); {write_remedy(error)} and resume the run") from error
    return digest


def read_sealed_file(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return the header and the arrays of a sealed file."""
    with _report_damage(path), safe_open(path, framework="np") as file:
        sealed = parse_json(file.metadata()["fedsim"])
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if _hash_content(sealed["header"], arrays) != sealed["sha256"]:
            raise ValueError("its bytes are not those that were saved")
        return parse_json(sealed["header"]), arrays


def read_seal(path: Path) -> str:
    """Return the SHA-256 that a sealed file holds; only `read_sealed_file` checks it."""
    with _report_damage(path), safe_open(path, framework="np") as file:
        return str(parse_json(file.metadata()["fedsim"])["sha256"])


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a sealed file without reading its arrays, and so unchecked."""
    with _report_damage(path), safe_open(path, framework="np") as file:
        return dict(parse_json(parse_json(file.metadata()["fedsim"])["header"]))


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Raise RunError where the block meets a file that cannot be read, or is none that fedsim sealed."""
    try:
        check_readable(path)
        yield
    except (OSError, SafetensorError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RunError(f"{path}: is damaged ({error}); remove it to begin the run again") from error


def _hash_content(header: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(header.encode())
    for key in sorted(arrays):
        digest.update(f"{key}:{arrays[key].dtype.str}:{arrays[key].shape};".encode())
        digest.update(arrays[key].tobytes())
    return digest.hexdigest()
