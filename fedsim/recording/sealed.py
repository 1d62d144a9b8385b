"""A file of arrays under one JSON header, with a SHA-256 of both; what a run resumes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsim.errors import RunError
from fedsim.files import check_readable, in_one_step, parse_json

Arrays = dict[str, NDArray[Any]]


def write_sealed(
    path: Path,
    header: Mapping[str, Any],
    arrays: Arrays,
    *,
    durable: bool = False,
    announce: Callable[[str], None] | None = None,
) -> str:
    """Write a sealed file in one step; its SHA-256, which is not that of the file's bytes.

    Args:
        durable: wait until the disk has it.
        announce: told the SHA-256 before there is a file that bears it.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    text = json.dumps(header)
    digest = _digest(text, arrays)
    if announce is not None:
        announce(digest)
    try:
        with in_one_step(path, durable=durable) as temporary:
            save_file(arrays, temporary, metadata={"fedsim": json.dumps({"header": text, "sha256": digest})})
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); make room and resume the run") from error
    return digest


def read_sealed(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of a sealed file.

    Raises:
        RunError: the file is damaged.
    """
    try:
        check_readable(path)
        with safe_open(path, framework="np") as file:
            sealed = parse_json(file.metadata()["fedsim"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if _digest(sealed["header"], arrays) != sealed["sha256"]:
            raise ValueError("its bytes are not those that were saved")
        return parse_json(sealed["header"]), arrays
    except (OSError, SafetensorError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RunError(f"{path}: is damaged ({error}); remove it to begin the run again") from error


def seal_of(path: Path) -> str:
    """The SHA-256 that `write_sealed` returned; whether the file is still of it, `read_sealed` says.

    Raises:
        RunError: the file is damaged.
    """
    try:
        check_readable(path)
        with safe_open(path, framework="np") as file:
            return str(parse_json(file.metadata()["fedsim"])["sha256"])
    except (OSError, SafetensorError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RunError(f"{path}: is damaged ({error}); remove it to begin the run again") from error


def _digest(header: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(header.encode())
    for key in sorted(arrays):
        digest.update(f"{key}:{arrays[key].dtype.str}:{arrays[key].shape};".encode())
        digest.update(arrays[key].tobytes())
    return digest.hexdigest()
