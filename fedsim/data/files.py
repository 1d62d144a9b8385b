"""Files of a data folder: find them, or say how to get them, and check them against known sums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fedsim.base.errors import DataError

SUMS_FILE = "SHA256SUMS"
"""A file in the data folder with the checksums of its files, as `sha256sum` writes it."""

_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def require_data_folder(folder: Path | None, name: str) -> Path:
    """Return the data folder."""
    if folder is None:
        raise DataError(f"data: '{name}' needs a data folder; give --data-dir DIR or set FEDSIM_DATA")
    if not os.path.isdir(folder):  # noqa: PTH112 - also where the name is longer than names can be
        complaint = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise DataError(f"data: the data folder {folder} {complaint}; give --data-dir DIR or set FEDSIM_DATA")
    return folder


def require_folder_of(path: str | Path, folder: Path | None, name: str) -> Path:
    """Return the data folder, within which the relative setting `data.path` is."""
    if folder is None:  # and not that of the experiment file, as the user may have meant
        raise DataError(
            f"data: '{name}' needs a data folder for the relative data.path '{path}'; write the whole path, give "
            "--data-dir DIR or set FEDSIM_DATA"
        )
    return require_data_folder(folder, name)


def find_file(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """Return the first of several paths that is a file.

    Args:
        remedy: how to get the file, the end of a sentence.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    alternatives = "".join(f" (or {name})" for name in names[1:])
    raise DataError(f"{folder / names[0]}{alternatives}: no such file; {remedy}")


def find_named_file(path: str, folder: Path | None, name: str) -> tuple[Path, Path]:
    """Return the folder and the path of the user's own file that a data set reads.

    Args:
        path: the setting `data.path`, absolute or within the data folder.
    """
    file = Path(path).expanduser()
    home = file.parent if file.is_absolute() else require_folder_of(path, folder, name)
    within = file.name if file.is_absolute() else path
    return home, find_file(home, [within], correct_path(path, "correct data.path, absolute or within the data folder"))


def correct_path(path: str, remedy: str) -> str:
    """Return how to correct `data.path`, the end of a sentence: where it is in the current folder, its whole path.

    Args:
        remedy: what to do where it is not.
    """
    file = Path(path).expanduser()
    if file.is_absolute() or not os.path.exists(file):  # noqa: PTH110 - also where names are longer than they can be
        return remedy
    return (
        f"relative paths start in the data folder; for the one in the current folder, set data.path to {file.resolve()}"
    )


def download_remedy(name: str, folder: Path) -> str:
    """Return how to get a data set's official files, as the end of a sentence."""
    return f"on a machine with a network, `fedsim data {name} --download --data-dir {folder}` fetches it"


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error, in one line.

    >>> describe_error(ValueError("no  digits"))
    'ValueError: no digits'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def has_listed_sum(path: Path, folder: Path) -> bool:
    """Return whether `folder / SUMS_FILE` has the checksum of a file."""
    return _read_listed_sum(path, folder) is not None


def verify_checksum(path: Path, folder: Path, md5: str | None = None) -> Path:
    """Check a file against its SHA-256 in `folder / SUMS_FILE`, or else `md5`; return its path.

    A file without either passes. One that differs from the official file on purpose, such as a
    subset, passes once SUMS_FILE lists it.
    """
    listed = _read_listed_sum(path, folder)
    kind, expected = ("sha256", listed) if listed else ("md5", md5)
    if expected is None:
        return path
    try:
        with path.open("rb") as file:
            got = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fix its permissions or get it again") from error
    if got != expected:
        source = f"{folder / SUMS_FILE} lists" if listed else "the official file has"
        raise DataError(
            f"{path}: is damaged or another file, its {kind} is {got[:12]}... but {source} {expected[:12]}...; get it "
            f"again, or if it differs on purpose, write its sha256 into {folder / SUMS_FILE}"
        )
    return path


def _read_listed_sum(path: Path, folder: Path) -> str | None:
    sums_file = folder / SUMS_FILE
    if not path.is_relative_to(folder) or not sums_file.is_file():
        return None
    sums = _read_sums(sums_file, sums_file.stat().st_mtime_ns)
    return sums.get(path.relative_to(folder).as_posix())


@lru_cache(maxsize=4)
def _read_sums(path: Path, _mtime: int) -> Mapping[str, str]:
    """Return the listed checksums, cached until the file changes: hundreds of images ask."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({describe_error(error)}); write it again with sha256sum, or remove it"
        ) from error
    sums = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _SUM_LINE.fullmatch(line.rstrip())
        if match is None:
            raise DataError(f"{path}: line {number} is not 'SHA256  FILE'; write it again with sha256sum, or remove it")
        sums[match[2]] = match[1].lower()
    return sums
